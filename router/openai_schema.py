"""What OpenAI clients may send, as types: every field known by name, an unknown one refused by name.

    body ──parse──▶ ChatBody | CompletionBody ──ask──▶ Ask

Four kinds of fields: those that work; those that cannot change an answer and are taken (user, metadata, …); those that
this server does not have yet, refused by name unless they ask for nothing (best_of: 1, tools: []); and unknown ones.
Does not know HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Literal, TypeVar, cast

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError
from pydantic_core import ErrorDetails

from contracts.errors import InvalidRequest, shown
from contracts.sampling import MAX_LOGPROBS, SamplingParams
from router.chat_template import Conversation, Message
from router.exchange import Ask, ChatPrompt, Prompt, Route, TextPrompt, TokenPrompt
from router.model_card import ModelCard

_COMPLETION_DEFAULT_MAX_TOKENS = 16  # OpenAI's
_Body = TypeVar("_Body", bound="CommonBody")
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,9}")  # bounded: Python refuses to read a number of thousands of digits
_MAX_PATH_CHARS = 80
_TYPE_NAMES = re.compile(r"^(str|int|float|bool|none|list\[.*|dict\[.*|\w+-.*|literal\[.*|[A-Z]\w*)$")

# Fields of OpenAI or vLLM that are not served yet → the values that ask for nothing, beside null.
NOT_SERVED: Mapping[str, tuple[JsonValue, ...]] = {
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "store": (False,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    "truncate_prompt_tokens": (),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
}


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False, frozen=True)


class StreamOptions(_Strict):
    """How a stream ends."""

    include_usage: bool = False


class DiptychOptions(_Strict):
    """Ours: which way the request goes, and whether the answer says where its time went."""

    route: Literal["disaggregated", "colocated"] | None = None
    stages: bool = False


class TextPart(_Strict):
    """A piece of a message's content. Only text is served."""

    type: Literal["text"]
    text: str


class ChatMessage(_Strict):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    refusal: str | None = None
    tool_calls: list[JsonValue] | None = None
    tool_call_id: str | None = None

    def as_message(self, index: int) -> Message:
        """For the template. Raises InvalidRequest for turns that cannot be rendered."""
        if self.tool_calls:
            raise InvalidRequest(f"messages.{index}.tool_calls", f"{len(self.tool_calls)} calls", "is not served yet")
        if self.content is None and self.role != "assistant":
            raise InvalidRequest(f"messages.{index}.content", None, "must be a string or a list of text parts")
        content = self.content if self.content is not None else ""
        if not isinstance(content, str):
            content = "\n".join(part.text for part in content)
        return Message(self.role, content, self.name)


class CommonBody(_Strict):
    """What both endpoints take."""

    model: str = ""
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
    store: JsonValue = None
    truncate_prompt_tokens: JsonValue = None
    allowed_token_ids: JsonValue = None
    bad_words: JsonValue = None

    @property
    def wants_usage_chunk(self) -> bool:
        """Whether a stream ends with a chunk of usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def wants_stages(self) -> bool:
        """Whether the answer says where its time went."""
        return self.diptych is not None and self.diptych.stages


class CompletionBody(CommonBody):
    """POST /v1/completions."""

    prompt: str | list[int] | list[str] | list[list[int]]
    logprobs: int | None = None
    echo: bool | None = None
    best_of: JsonValue = None
    suffix: JsonValue = None


class ChatBody(CommonBody):
    """POST /v1/chat/completions."""

    messages: list[ChatMessage] = Field(min_length=1)
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, JsonValue] | None = None
    tools: JsonValue = None
    tool_choice: JsonValue = None
    functions: JsonValue = None
    function_call: JsonValue = None
    modalities: JsonValue = None
    audio: JsonValue = None
    prediction: JsonValue = None
    web_search_options: JsonValue = None
    continue_final_message: JsonValue = None
    chat_template: JsonValue = None
    documents: JsonValue = None


def parse(kind: type[_Body], body: bytes) -> _Body:
    """The body as a typed value. Raises InvalidRequest naming the first field at fault."""
    try:
        parsed = kind.model_validate_json(body)
    except ValidationError as error:
        raise _as_invalid(error.errors(include_url=False, include_context=False)) from error
    for name in parsed.model_fields_set & NOT_SERVED.keys():
        value: JsonValue = parsed.__dict__[name]
        # By type as well: to Python, true is 1.
        if value is not None and (type(value), value) not in [(type(none), none) for none in NOT_SERVED[name]]:
            raise InvalidRequest(name, value, "is not served yet; leave it out")
    if parsed.prompt_logprobs is not None and parsed.stream:
        raise InvalidRequest("prompt_logprobs", parsed.prompt_logprobs, "is not available with stream: true")
    return parsed


def completion_ask(body: CompletionBody, card: ModelCard, request_id: str, traceparent: str) -> Ask:
    """What a completion asks for. Raises InvalidRequest."""
    sampling = replace(_sampling(body, card), logprobs=body.logprobs)
    if body.max_tokens is not None:
        sampling = replace(sampling, max_tokens=body.max_tokens)
    if body.echo and body.logprobs is not None:  # of the prompt too
        if body.prompt_logprobs not in (None, body.logprobs):
            said = f"with echo it must be as logprobs, {body.logprobs}, or left out"
            raise InvalidRequest("prompt_logprobs", body.prompt_logprobs, said)
        sampling = replace(sampling, prompt_logprobs=body.logprobs)
    prompt_only = body.echo is True and body.max_tokens == 0
    if prompt_only:
        if sampling.min_tokens:
            raise InvalidRequest("min_tokens", sampling.min_tokens, "must be 0 with max_tokens: 0")
        sampling = replace(sampling, max_tokens=1, logprobs=None)
    ask = _ask(body, _completion_prompt(body), sampling, request_id, traceparent)
    ask = replace(ask, fill_context=body.max_tokens is None, fill_at_most=_COMPLETION_DEFAULT_MAX_TOKENS)
    return replace(ask, prompt_only=prompt_only)


def chat_ask(body: ChatBody, card: ModelCard, request_id: str, traceparent: str) -> Ask:
    """What a chat request asks for. Raises InvalidRequest."""
    if body.top_logprobs is not None and not body.logprobs:
        raise InvalidRequest("top_logprobs", body.top_logprobs, "needs logprobs: true")
    if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_LOGPROBS:
        raise InvalidRequest("top_logprobs", body.top_logprobs, f"must be from 0 to {MAX_LOGPROBS}")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    sampling = replace(_sampling(body, card), logprobs=logprobs)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    if max_tokens is not None:
        sampling = replace(sampling, max_tokens=max_tokens)
    conversation = Conversation(
        messages=tuple(message.as_message(index) for index, message in enumerate(body.messages)),
        add_generation_prompt=body.add_generation_prompt is not False,
        variables=tuple((body.chat_template_kwargs or {}).items()),
    )
    prompt = ChatPrompt(conversation, body.add_special_tokens is True)
    ask = _ask(body, prompt, sampling, request_id, traceparent)
    return replace(ask, fill_context=max_tokens is None)


def _ask(body: CommonBody, prompt: Prompt, sampling: SamplingParams, request_id: str, traceparent: str) -> Ask:
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    route = None if body.diptych is None or body.diptych.route is None else Route(body.diptych.route)
    return Ask(
        request_id=request_id,
        prompt=prompt,
        sampling=sampling,
        n=1 if body.n is None else body.n,
        model=body.model,
        stop=stop,
        include_stop=body.include_stop_str_in_output is True,
        skip_special_tokens=body.skip_special_tokens is not False,
        priority=body.priority or 0,
        route=route,
        traceparent=traceparent,
    )


def _sampling(body: CommonBody, card: ModelCard) -> SamplingParams:
    """The model's defaults with the fields that the body has."""
    base = card.sampling()
    top_k = base.top_k if body.top_k is None else max(body.top_k, 0) if body.top_k >= -1 else body.top_k
    return replace(
        base,
        temperature=_given(body.temperature, base.temperature),
        top_p=_given(body.top_p, base.top_p),
        min_p=_given(body.min_p, base.min_p),
        repetition_penalty=_given(body.repetition_penalty, base.repetition_penalty),
        presence_penalty=_given(body.presence_penalty, base.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, base.frequency_penalty),
        top_k=top_k,  # -1 is vLLM's other word for all
        seed=base.seed if body.seed is None else body.seed,
        min_tokens=body.min_tokens or 0,
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=body.ignore_eos is True,
        logit_bias=_logit_bias(body.logit_bias or {}),
        prompt_logprobs=body.prompt_logprobs,
    )


def _given(value: float | None, default: float) -> float:
    return default if value is None else value


def _logit_bias(given: Mapping[str, float]) -> tuple[tuple[int, float], ...]:
    for key in given:
        if not _TOKEN_ID.fullmatch(key):
            raise InvalidRequest("logit_bias", key, "keys must be token ids, each spelled in one way")
    return tuple(sorted((int(key), bias) for key, bias in given.items()))


def _completion_prompt(body: CompletionBody) -> Prompt:
    prompt = body.prompt
    if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
        if len(prompt) > 1:
            raise InvalidRequest(
                "prompt", f"{len(prompt)} prompts", "one prompt per request is served; send them one by one"
            )
        prompt = prompt[0]
    if isinstance(prompt, str):
        return TextPrompt(prompt, body.add_special_tokens is not False)
    return TokenPrompt(tuple(cast("list[int]", prompt)))  # the schema has looked at each already


def _as_invalid(errors: list[ErrorDetails]) -> InvalidRequest:
    first = errors[0]
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
        return InvalidRequest("prompt", first["input"], "must be a string, or a list of token ids")
    return InvalidRequest(path or "body", first["input"], message)
