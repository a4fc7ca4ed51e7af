"""Asks one question over OpenAI HTTP or gRPC, and keeps what came, token by token with its time.

    question ──▶ stream of pieces ──on_text──▶ screen
                         └──────────▶ Answer: text, ids, TTFT, gaps, what the hand-off moved

The clock is the client's own. Does not know screens or clusters.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import grpc
import httpx
import msgspec

from cli.demo.questions import Protocol, Question
from contracts.errors import DiptychError
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from contracts.wire import handoff_stats_from_pb
from observability.stages import HandoffStats
from rpc.errors import from_rpc_error

ANSWER_TIMEOUT_S = 600.0


class BadAnswer(DiptychError):
    """A door answered with something else than an answer."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One question's answer and its times in seconds, as the client saw them.

    `gaps_s` are the gaps between pieces with tokens. `handoff` is None where there was none.
    """

    question: Question
    text: str
    token_ids: tuple[int, ...]
    num_prompt_tokens: int
    ttft_s: float
    gaps_s: tuple[float, ...]
    handoff: HandoffStats | None


@dataclass(slots=True)
class Arrivals:
    """What has come of one answer so far. Owned by the coroutine that reads the stream."""

    question: Question
    on_text: Callable[[str], None]
    began_s: float = field(default_factory=time.monotonic)
    times_s: list[float] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)

    def take(self, text: str, token_ids: list[int]) -> None:
        """One piece of the stream."""
        if token_ids:
            self.times_s.append(time.monotonic())
            self.token_ids += token_ids
        if text:
            self.texts.append(text)
            self.on_text(text)

    def answer(self, num_prompt_tokens: int, handoff: HandoffStats | None) -> Answer:
        """The stream is over."""
        if not self.times_s:
            raise BadAnswer(f"{self.question.title}: the answer has no tokens")
        gaps = tuple(later - earlier for earlier, later in zip(self.times_s, self.times_s[1:], strict=False))
        return Answer(
            question=self.question,
            text="".join(self.texts),
            token_ids=tuple(self.token_ids),
            num_prompt_tokens=num_prompt_tokens,
            ttft_s=self.times_s[0] - self.began_s,
            gaps_s=gaps,
            handoff=handoff,
        )


class Asker:
    """A client of one cluster over both protocols. Owns its connections; close it."""

    def __init__(self, http_url: str, channel: grpc.aio.Channel, model: str) -> None:
        # No proxy from the environment: the cluster is on this machine.
        self._http = httpx.AsyncClient(base_url=http_url, timeout=ANSWER_TIMEOUT_S, trust_env=False)
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._model = model

    async def ask(self, question: Question, on_text: Callable[[str], None]) -> Answer:
        """The answer, its text handed to `on_text` as it comes. Raises DiptychError."""
        ask = self._ask_openai if question.protocol is Protocol.OPENAI else self._ask_grpc
        return await ask(Arrivals(question, on_text))

    async def close(self) -> None:
        """Let go of the HTTP connections; the channel is its maker's."""
        await self._http.aclose()

    async def _ask_grpc(self, arrivals: Arrivals) -> Answer:
        question = arrivals.question
        request = inference_pb2.GenerateRequest(
            model=self._model,
            chat=inference_pb2.Chat(messages=[inference_pb2.ChatMessage(role="user", content=question.content)]),
            sampling=types_pb2.SamplingParams(
                temperature=question.temperature,
                top_p=question.top_p,
                seed=question.seed,
                max_tokens=question.max_tokens,
            ),
        )
        last: inference_pb2.GenerateResponse | None = None
        try:
            async for piece in self._stub.Generate(request, timeout=ANSWER_TIMEOUT_S):
                arrivals.take(piece.text, list(piece.token_ids))
                last = piece
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error, question.title) from error
        if last is None:
            raise BadAnswer(f"{question.title}: the stream ended without a word")
        handoff = handoff_stats_from_pb(last.handoff) if last.HasField("handoff") else None
        return arrivals.answer(last.usage.prompt_tokens, handoff)

    async def _ask_openai(self, arrivals: Arrivals) -> Answer:
        question = arrivals.question
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": question.content}],
            "temperature": question.temperature,
            "top_p": question.top_p,
            "seed": question.seed,
            "max_completion_tokens": question.max_tokens,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
            "diptych": {"stages": True},
        }
        num_prompt_tokens = 0
        handoff: HandoffStats | None = None
        try:
            async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    reason = (await response.aread()).decode("utf-8", "replace")
                    raise BadAnswer(f"{question.title}: HTTP {response.status_code}: {reason}")
                async for chunk in _chunks(response):
                    if chunk.error is not None:
                        raise BadAnswer(f"{question.title}: {chunk.error.message}")
                    for choice in chunk.choices:
                        arrivals.take(choice.delta.content or "", choice.token_ids or [])
                    if chunk.diptych is not None:
                        handoff = chunk.diptych.handoff
                    if chunk.usage is not None:
                        num_prompt_tokens = chunk.usage.prompt_tokens
        except httpx.HTTPError as error:
            raise BadAnswer(f"{question.title}: {type(error).__name__}: {error}") from error
        return arrivals.answer(num_prompt_tokens, handoff)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    delta: _Delta
    token_ids: list[int] | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int


class _Error(msgspec.Struct):
    message: str


class _Account(msgspec.Struct):
    handoff: HandoffStats | None = None


class _Chunk(msgspec.Struct):
    """The fields of a streamed chat completion that matter here; others are passed over."""

    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: _Usage | None = None
    diptych: _Account | None = None
    error: _Error | None = None


async def _chunks(response: httpx.Response) -> AsyncIterator[_Chunk]:
    """The events of a server-sent stream up to [DONE]; a stream that ends before is an error, not an end."""
    async for line in response.aiter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            yield msgspec.json.decode(data, type=_Chunk)
        except msgspec.DecodeError as error:
            raise BadAnswer(f"an event that is not a completion chunk: {error}") from error
    raise BadAnswer("the stream ended without [DONE]")
