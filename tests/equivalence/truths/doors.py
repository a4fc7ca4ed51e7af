"""The same question at each door: as an OpenAI client asks it, whole or streamed, and as a gRPC client does."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any

from contracts.pb.diptych.v1 import inference_pb2 as pb
from contracts.pb.diptych.v1 import types_pb2
from contracts.request import TokenLogprob
from contracts.wire import sampling_to_pb
from router.choosing.route import Route
from tests.equivalence.truths.case import Chat, Entries, Entry, Heard, Question, Said
from tests.equivalence.truths.house import EOS, House
from tests.equivalence.truths.naive import prompt_ids, token_text
from tests.integration.router_harness import MODEL

OnTokens = Callable[[int], None]  # how many tokens of answer 0 were heard by now
Door = Callable[[House, Question, Route, OnTokens], Awaitable[Heard]]
_GRPC_ROUTES = {Route.DISAGGREGATED: pb.ROUTE_DISAGGREGATED, Route.COLOCATED: pb.ROUTE_COLOCATED}
_FINISH = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}


# OpenAI


async def openai_whole(house: House, question: Question, route: Route, on_tokens: OnTokens) -> Heard:
    del on_tokens
    response = await _create(house, question, route)
    answers, prompt_entries = [], ()
    accounts = [response.model_extra["diptych"]] if question.n == 1 else []
    for choice in response.choices:
        extra = choice.model_extra
        text = choice.message.content if isinstance(question.prompt, Chat) else choice.text
        entries = _openai_entries(question, choice.logprobs)
        stop = _stop(question, choice.finish_reason, extra["stop_reason"])
        answers.append(Said(text, tuple(extra["token_ids"]), choice.finish_reason, stop, entries))
        accounts += [extra["diptych"]] if question.n > 1 else []
        if not isinstance(question.prompt, Chat) and "prompt_logprobs" in extra and not question.echo:
            prompt_entries = _vllm_entries(question, extra["prompt_logprobs"])
    assert [choice.index for choice in response.choices] == list(range(question.n))
    if isinstance(question.prompt, Chat) and "prompt_logprobs" in response.model_extra:
        prompt_entries = _vllm_entries(question, response.model_extra["prompt_logprobs"])
    handed_off = tuple(account["handoff"] is not None for account in accounts)
    return Heard(tuple(answers), *_usage(response.usage), prompt_entries, handed_off)


async def openai_stream(house: House, question: Question, route: Route, on_tokens: OnTokens) -> Heard:
    made = _Made(question.n)
    usage, roles = None, 0
    stream = await _create(house, question, route, stream=True, stream_options={"include_usage": True})
    async for chunk in stream:
        assert usage is None, "usage is the last chunk"
        usage = chunk.usage
        assert (usage is None) == bool(chunk.choices)
        for choice in chunk.choices:
            extra = choice.model_extra
            if isinstance(question.prompt, Chat):
                text, roles = choice.delta.content, roles + (choice.delta.role == "assistant")
            else:
                text = choice.text
                made.check_offsets(choice.index, choice.logprobs)
            made.add(choice.index, text or "", extra.get("token_ids") or (), _openai_entries(question, choice.logprobs))
            if choice.finish_reason is not None:
                handed_off = chunk.model_extra["diptych"]["handoff"] is not None
                stop = _stop(question, choice.finish_reason, extra["stop_reason"])
                made.end(choice.index, choice.finish_reason, stop, handed_off)
        on_tokens(len(made.token_ids[0]))
    assert usage is not None
    assert roles == (question.n if isinstance(question.prompt, Chat) else 0)
    return made.heard(_usage(usage))


def _stop(question: Question, finish_reason: str, stop_reason: str | int | None) -> str | int | None:
    """What ended it. OpenAI's door says nothing of the end of text, unless the client named that token."""
    if finish_reason != "stop" or stop_reason is not None:
        assert not isinstance(stop_reason, int) or stop_reason in question.sampling.stop_token_ids
        return stop_reason
    return EOS


def _create(house: House, question: Question, route: Route, **more: Any) -> Awaitable[Any]:
    s = question.sampling
    extra: dict[str, Any] = {
        "top_k": s.top_k,
        "min_p": s.min_p,
        "repetition_penalty": s.repetition_penalty,
        "min_tokens": s.min_tokens,
        "stop_token_ids": s.stop_token_ids,
        "ignore_eos": s.ignore_eos,
        "include_stop_str_in_output": question.include_stop,
        "skip_special_tokens": question.skip_special_tokens,
        "return_token_ids": True,
        "diptych": {"route": route.value, "stages": True},
    }
    if s.prompt_logprobs is not None and not question.echo:
        extra["prompt_logprobs"] = s.prompt_logprobs
    asked: dict[str, Any] = {
        "model": MODEL,
        "temperature": s.temperature,
        "top_p": s.top_p,
        "presence_penalty": s.presence_penalty,
        "frequency_penalty": s.frequency_penalty,
        "logit_bias": {str(token_id): bias for token_id, bias in s.logit_bias},
        "seed": s.seed,
        "max_tokens": 0 if question.prompt_only else s.max_tokens,
        "stop": list(question.stop),
        "n": question.n,
        "extra_body": extra,
        **more,
    }
    if isinstance(question.prompt, Chat):
        messages = [{"role": "user", "content": question.prompt.text}]
        logprobs = {} if s.logprobs is None else {"logprobs": True, "top_logprobs": s.logprobs}
        return house.client.chat.completions.create(messages=messages, **logprobs, **asked)
    prompt = question.prompt if isinstance(question.prompt, str) else list(question.prompt)
    logprobs = {} if s.logprobs is None else {"logprobs": s.logprobs}
    return house.client.completions.create(prompt=prompt, echo=question.echo, **logprobs, **asked)


def _usage(usage: Any) -> tuple[int, int, int]:
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage.prompt_tokens, usage.completion_tokens, usage.prompt_tokens_details.cached_tokens


def _openai_entries(question: Question, logprobs: Any) -> Entries:
    if logprobs is None:
        return ()
    if isinstance(question.prompt, Chat):
        for entry in logprobs.content:
            shown = bytes(entry.bytes)
            assert entry.token.startswith("bytes:") or entry.token.encode() == shown
            assert len(entry.top_logprobs) == question.sampling.logprobs
        return tuple(
            Entry(e.token, e.logprob, {t.token: t.logprob for t in e.top_logprobs} | {e.token: e.logprob})
            for e in logprobs.content
        )
    parts = zip(logprobs.tokens, logprobs.token_logprobs, logprobs.top_logprobs, strict=True)
    return tuple(None if value is None else Entry(token, value, top) for token, value, top in parts)


def _vllm_entries(question: Question, prompt_logprobs: Sequence[Mapping[str, Mapping[str, Any]] | None]) -> Entries:
    entries: list[Entry | None] = []
    for token_id, shown in zip(prompt_ids(question), prompt_logprobs, strict=True):
        if shown is None:
            entries.append(None)
            continue
        own = shown[str(token_id)]
        top = {one["decoded_token"]: one["logprob"] for one in shown.values()}
        entries.append(Entry(own["decoded_token"], own["logprob"], top))
    return tuple(entries)


# gRPC


async def grpc_stream(house: House, question: Question, route: Route, on_tokens: OnTokens) -> Heard:
    made = _Made(question.n)
    prompt_entries: Entries = ()
    usage: tuple[int, int, int] | None = None
    async for piece in house.stub.Generate(_request(question, route)):
        assert usage is None, "usage is on the last piece"
        made.add(piece.index, piece.text, piece.token_ids, tuple(map(_grpc_entry, piece.logprobs)))
        prompt_entries += tuple(_grpc_entry(e) if e.rank else None for e in piece.prompt_logprobs)
        if piece.finish_reason:
            stop = piece.stop_string or (piece.stop_token_id if piece.HasField("stop_token_id") else None)
            made.end(piece.index, _FINISH[piece.finish_reason], stop, piece.HasField("handoff"))
        if piece.HasField("usage"):
            usage = (piece.usage.prompt_tokens, piece.usage.completion_tokens, piece.usage.cached_tokens)
        on_tokens(len(made.token_ids[0]))
    assert usage is not None
    return made.heard(usage, prompt_entries)


def _request(question: Question, route: Route) -> pb.GenerateRequest:
    request = pb.GenerateRequest(
        sampling=sampling_to_pb(question.sampling),
        stop=question.stop,
        include_stop=question.include_stop,
        skip_special_tokens=question.skip_special_tokens,
        n=question.n,
        route=_GRPC_ROUTES[route],
    )
    match question.prompt:
        case Chat(text):
            request.chat.messages.add(role="user", content=text)
        case str(text):
            request.text = text
        case ids:
            request.token_ids.ids.extend(ids)
    return request


def _grpc_entry(message: types_pb2.TokenLogprob) -> Entry:
    entry = TokenLogprob(message.token_id, message.logprob, message.rank)
    top = {token_text(t.token_id): t.logprob for t in message.top}
    token = token_text(entry.token_id)
    return Entry(token, entry.logprob, top | {token: entry.logprob})


class _Made:
    """Answers while they are streamed."""

    def __init__(self, n: int) -> None:
        self.token_ids: list[list[int]] = [[] for _ in range(n)]
        self._text = [""] * n
        self._entries: list[Entries] = [()] * n
        self._offsets = [0] * n  # of the next token's text
        self._ends: dict[int, tuple[str, str | int | None, bool]] = {}

    def add(self, index: int, text: str, token_ids: Iterable[int], entries: Entries) -> None:
        assert index not in self._ends
        assert "\ufffd" not in self._text[index], "half a character in the middle"
        self._text[index] += text
        self.token_ids[index].extend(token_ids)
        self._entries[index] += entries

    def check_offsets(self, index: int, logprobs: Any) -> None:
        """OpenAI's text_offset goes on from chunk to chunk."""
        if logprobs is not None:
            for token, offset in zip(logprobs.tokens, logprobs.text_offset, strict=True):
                assert offset == self._offsets[index]
                self._offsets[index] += len(token)

    def end(self, index: int, reason: str, stop: str | int | None, handed_off: bool) -> None:
        assert index not in self._ends
        self._ends[index] = (reason, stop, handed_off)

    def heard(self, usage: tuple[int, int, int], prompt_entries: Entries = ()) -> Heard:
        answers = tuple(
            Said(self._text[i], tuple(self.token_ids[i]), *self._ends[i][:2], self._entries[i])
            for i in range(len(self.token_ids))
        )
        return Heard(answers, *usage, prompt_entries, tuple(self._ends[i][2] for i in range(len(answers))))


DOORS: Mapping[str, Door] = {"openai": openai_whole, "openai-stream": openai_stream, "grpc": grpc_stream}
