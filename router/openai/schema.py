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

from contracts.errors import InvalidRequest, shown
from router.openai.messages import ChatMessage, FreeJson, Strict

_Body = TypeVar("_Body", bound=Strict)
_MAX_PATH_CHARS = 80
_TYPE_NAMES = re.compile(r"^(str|int|float|bool|none|list|dict|list\[.*|dict\[.*|\w+-.*|literal\[.*|[A-Z]\w*)$")

# Fields of OpenAI or vLLM that are not served yet → the values that ask for nothing, beside null.
NOT_SERVED: Mapping[str, tuple[JsonValue, ...]] = {
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "functions": ([],),
    "function_call": ("none", "auto"),
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
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
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
    service_tier: Literal["auto", "default", "flex", "scale", "priority"] | None = None
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

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: int | None = None
    suffix: JsonValue = None
    prompt_embeds: JsonValue = None


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, FreeJson] | None = None
    tools: FreeJson = None
    tool_choice: FreeJson = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    documents: list[dict[str, FreeJson]] | None = None
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
    messages: list[ChatMessage] | None = Field(default=None, min_length=1)
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
    tokens: list[int]


def parse(kind: type[_Body], body: bytes) -> _Body:
    """The body as a typed value. Raises InvalidRequest naming the first field at fault."""
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


def _check_stream(body: CommonBody) -> None:
    if body.prompt_logprobs is not None and body.stream:
        raise InvalidRequest("prompt_logprobs", body.prompt_logprobs, "is not available with stream: true")
    if body.stream_options is not None and not body.stream:
        raise InvalidRequest("stream_options", "options", "is only for stream: true")


def _as_invalid(error: ValidationError) -> InvalidRequest:
    first = error.errors(include_url=False, include_context=False)[0]
    if first["type"] == "json_invalid":
        body = first["input"][:_MAX_PATH_CHARS].decode(errors="replace")
        return InvalidRequest("body", body, f"must be JSON in UTF-8: {first['msg']}")
    *above, last = [*first["loc"]] or [""]
    parts = [part for part in above if isinstance(part, int) or not _TYPE_NAMES.match(part)]
    # A field that nobody knows may be called as a type is.
    if isinstance(last, int) or first["type"] == "extra_forbidden" or not _TYPE_NAMES.match(last):
        parts.append(last)
    path = ".".join(str(part) for part in parts)
    if len(path) > _MAX_PATH_CHARS or not path.isprintable():  # the client's own word for a field
        path = shown(path)
    if first["type"] == "extra_forbidden":
        return InvalidRequest(path, first["input"], "is not a field of this request")
    if first["type"] == "missing":
        return InvalidRequest(path or "body", None, "is required")
    message = first["msg"][:1].lower() + first["msg"][1:]
    if path == "prompt" or path.startswith("prompt."):
        return InvalidRequest("prompt", first["input"], "must be a string, a list of token ids, or a list of either")
    return InvalidRequest(path or "body", first["input"], message)
