"""What OpenAI clients may send, as types: every field known by name, an unknown one refused by name.

    body ──parse──▶ ChatBody | CompletionBody | TokenizeBody | DetokenizeBody

Four kinds of fields: those that work; those that cannot change an answer and are taken (user, metadata, …); those that
this server does not have yet, refused by name unless they ask for nothing (store: false); and unknown ones. What is asked
for is in `router.openai.ask`. Does not know HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Literal, TypeVar

from pydantic import Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from contracts.errors import InvalidRequest, shown
from router.openai.messages import MAX_MESSAGES, ChatMessage, FreeJson, Listed, Strict

_Body = TypeVar("_Body", bound=Strict)
_MAX_PATH_CHARS = 80
_MOST_MISTAKES = 1000
MAX_MADE = 2**17  # lists, objects and fields of all objects together
# Each in one pass, also where nothing ends it: what cannot be read is said later.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+(?:"|\\?\Z)', re.DOTALL)
_MUST_BE = {
    "string_type": "a string",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
}
_TYPE_NAMES = re.compile(r"^(str|int|float|bool|none|list|dict|list\[.*|dict\[.*|\w+-.*|literal\[.*|[A-Z]\w*)$")

# Fields of OpenAI or vLLM that are not served yet → the values that ask for nothing, beside null.
NOT_SERVED: Mapping[str, tuple[JsonValue, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_decoding_backend": (),
    "guided_whitespace_pattern": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "moderation": (),
    "store": (False,),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "logits_processors": ([],),
    "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
    "cache_salt": (),
    "prompt_embeds": (),
    "kv_transfer_params": (),
    "vllm_xargs": (),
    "media_io_kwargs": (),
    "mm_processor_kwargs": (),
}


class StreamOptions(Strict):
    """How a stream ends."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None  # vLLM's: usage so far in every chunk
    include_obfuscation: Literal[False] | None = None


class DiptychOptions(Strict):
    """Ours: which way the request goes, and whether the answer says where its time went."""

    route: Literal["disaggregated", "colocated"] | None = None
    stages: bool | None = None


class CommonBody(Strict):
    """What both endpoints take."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    stop: str | Listed[str] | None = None
    stop_token_ids: Listed[int] | None = None
    ignore_eos: bool | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Literal[True] | None = None
    include_stop_str_in_output: bool | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    truncate_prompt_tokens: int | None = None
    priority: int | None = None
    request_id: str | None = None
    diptych: DiptychOptions | None = None
    # Taken, and without influence on the answer.
    user: str | None = None
    metadata: dict[str, str] | None = None
    service_tier: Literal["auto", "default"] | None = None  # the others promise another speed or price
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None
    prompt_cache_options: dict[str, FreeJson] | None = None
    parallel_tool_calls: bool | None = None
    # Not served yet; see NOT_SERVED.
    use_beam_search: JsonValue = None
    length_penalty: JsonValue = None
    response_format: JsonValue = None
    structured_outputs: JsonValue = None
    guided_json: JsonValue = None
    guided_regex: JsonValue = None
    guided_choice: JsonValue = None
    guided_grammar: JsonValue = None
    guided_decoding_backend: JsonValue = None
    guided_whitespace_pattern: JsonValue = None
    store: JsonValue = None
    allowed_token_ids: JsonValue = None
    bad_words: JsonValue = None
    logits_processors: JsonValue = None
    return_tokens_as_token_ids: JsonValue = None
    cache_salt: JsonValue = None
    kv_transfer_params: JsonValue = None
    vllm_xargs: JsonValue = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage is True

    @property
    def wants_running_usage(self) -> bool:
        """Whether every chunk of a stream says the usage so far."""
        return self.stream_options is not None and self.stream_options.continuous_usage_stats is True

    @property
    def wants_stages(self) -> bool:
        """Whether the answer says where its time went."""
        return self.diptych is not None and self.diptych.stages is True


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    prompt: str | Listed[int] | Listed[str] | Listed[Listed[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: JsonValue = None
    prompt_embeds: JsonValue = None


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: Listed[ChatMessage] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, FreeJson] | None = None
    tools: FreeJson = None
    tool_choice: FreeJson = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: Listed[dict[str, FreeJson]] | None = Field(default=None, max_length=MAX_MESSAGES)
    # Not served yet; see NOT_SERVED.
    functions: JsonValue = None
    function_call: JsonValue = None
    modalities: JsonValue = None
    audio: JsonValue = None
    prediction: JsonValue = None
    web_search_options: JsonValue = None
    reasoning_effort: JsonValue = None
    verbosity: JsonValue = None
    moderation: JsonValue = None
    include_reasoning: JsonValue = None
    media_io_kwargs: JsonValue = None
    mm_processor_kwargs: JsonValue = None


class TokenizeBody(Strict):
    """POST /tokenize: a prompt, or a conversation as the template renders it."""

    model: str | None = None
    prompt: str | None = None
    messages: Listed[ChatMessage] | None = Field(default=None, min_length=1, max_length=MAX_MESSAGES)
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, FreeJson] | None = None
    tools: FreeJson = None
    media_io_kwargs: JsonValue = None
    mm_processor_kwargs: JsonValue = None


class DetokenizeBody(Strict):
    """POST /detokenize."""

    model: str | None = None
    tokens: Listed[int]


def parse(kind: type[_Body], body: bytes) -> _Body:
    """The body as a typed value. Raises InvalidRequest naming the first field at fault."""
    _check_size(body)
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid(error) from error
    for name in parsed.model_fields_set & NOT_SERVED.keys():
        value: JsonValue = parsed.__dict__[name]
        # By type as well: to Python, true is 1.
        if value is not None and (type(value), value) not in [(type(none), none) for none in NOT_SERVED[name]]:
            raise InvalidRequest(name, value, "is not served yet; leave it out")
    if isinstance(parsed, CommonBody):
        _check_stream(parsed)
    return parsed


def checked(kind: type[_Body], fields: Mapping[str, object]) -> _Body:
    """The same of values that another door has read. Raises InvalidRequest for what no JSON of OpenAI's could have held."""
    try:
        return kind.model_validate(fields)
    except ValidationError as error:
        raise _as_invalid(error) from error


def _check_size(body: bytes) -> None:
    """Numbers and strings are read ten times as fast as lists, objects and what they have by name: a body of 8 MB that is made of
    those holds everybody up for seconds. Prompts may be full of brackets.
    """
    if _num_made(body) > MAX_MADE and (made := _num_made(_STRING.sub(b"", body))) > MAX_MADE:
        raise InvalidRequest("body", made, f"at most {MAX_MADE} lists, objects and fields in one request")


def _num_made(body: bytes) -> int:
    return body.count(b"[") + body.count(b"{") + body.count(b":")


def _check_stream(body: CommonBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs", body.prompt_logprobs, "is not available with stream: true")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "options", "is only for stream: true")


def _as_invalid(error: ValidationError) -> InvalidRequest:
    num_mistakes = error.error_count()
    if num_mistakes > _MOST_MISTAKES:  # to name them takes seconds when they are a million
        return InvalidRequest("body", num_mistakes, "so many fields are none of this request, or not of their types")
    mistakes = error.errors(include_url=False)
    first = mistakes[0]
    if first["type"] == "json_invalid":
        body = first["input"][:_MAX_PATH_CHARS].decode(errors="replace")
        return InvalidRequest("body", body, f"must be JSON in UTF-8: {first['msg']}")
    field = _path_of(first)
    if field[:1] == ["prompt"]:
        return InvalidRequest(
            "prompt", first["input"], "must be a string, a list of token ids, a list of strings or a list of such lists"
        )
    # Where a field may be one of several, the mistake that is deepest in it is of the one that was meant.
    of_field = [(_path_of(mistake), mistake) for mistake in mistakes if _path_of(mistake)[: len(field)] == field]
    parts, meant = max(of_field, key=lambda one: len(one[0]))
    path = ".".join(str(part) for part in parts)
    if len(path) > _MAX_PATH_CHARS or not path.isprintable():  # the client's own word for a field
        path = shown(path)
    if meant["type"] == "extra_forbidden":
        return InvalidRequest(path, meant["input"], "is not a field of this request")
    if meant["type"] == "missing":
        return InvalidRequest(path or "body", None, "is required")
    said = dict.fromkeys(_said(mistake) for other, mistake in of_field if other == parts)
    return InvalidRequest(path or "body", meant["input"], " or ".join(said).replace(" or must be ", " or "))


def _path_of(mistake: ErrorDetails) -> list[int | str]:
    *above, last = [*mistake["loc"]] or [""]
    parts = [part for part in above if isinstance(part, int) or not _TYPE_NAMES.match(part)]
    # A field that nobody knows may be called as a type is.
    if isinstance(last, int) or mistake["type"] == "extra_forbidden" or not _TYPE_NAMES.match(last):
        parts.append(last)
    return parts


def _said(mistake: ErrorDetails) -> str:
    """What a value must be."""
    kind, said, context = mistake["type"], mistake["msg"], mistake.get("ctx", {})
    if kind in ("too_short", "too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        return f"must have at least {least}" if most is None else f"must have at most {most} entries"
    return f"must be {_MUST_BE[kind]}" if kind in _MUST_BE else re.sub(r"^[Ii]nput should be", "must be", said)
