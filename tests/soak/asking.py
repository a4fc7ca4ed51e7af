"""One request over gRPC or HTTP, and what was heard of its answer, whole or not.

    Planned, Question ──ask──▶ Heard(outcome: done, left, failed, hung; parts so far)

Does not know what is right.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
import httpx
import msgspec

from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from rpc.channel import open_channel
from tests.soak.plan import TEMPERATURE, Door, Planned, Question

HANG_S = 60.0
_REASONS = {types_pb2.FINISH_REASON_STOP: "stop", types_pb2.FINISH_REASON_LENGTH: "length"}
_ROUTES = {
    None: inference_pb2.ROUTE_UNSPECIFIED,
    "colocated": inference_pb2.ROUTE_COLOCATED,
    "disaggregated": inference_pb2.ROUTE_DISAGGREGATED,
}


class Outcome(StrEnum):
    """How a request ended for its client."""

    DONE = "done"
    LEFT = "left"
    FAILED = "failed"
    HUNG = "hung"


@dataclass(slots=True)
class Part:
    """What was heard of one of a request's answers; `reason` is set once it has ended."""

    text: str = ""
    token_ids: tuple[int, ...] = ()
    reason: str | None = None

    def add(self, text: str, token_ids: tuple[int, ...], reason: str | None) -> None:
        """One more piece."""
        self.text += text
        self.token_ids += token_ids
        self.reason = reason if reason is not None else self.reason


@dataclass(slots=True)
class Heard:
    """What one client heard. `error` is its code and words; `usage` the completion's tokens once it is complete."""

    parts: dict[int, Part] = field(default_factory=dict)
    outcome: Outcome = Outcome.DONE
    error: str = ""
    usage: int | None = None
    num_pieces: int = 0
    took_s: float = 0.0

    def piece(self, index: int, text: str, token_ids: tuple[int, ...], reason: str | None) -> None:
        """One piece of answer `index`."""
        self.num_pieces += 1
        self.parts.setdefault(index, Part()).add(text, token_ids, reason)


class RequestFailed(Exception):
    """The router said so, or the connection broke."""


class Asker:
    """The clients of one cluster: one gRPC channel and one HTTP pool for all of them. Owns both; `open_asker` makes it."""

    def __init__(self, channel: grpc.aio.Channel, client: httpx.AsyncClient, model: str) -> None:
        self._stub = inference_pb2_grpc.InferenceStub(channel)
        self._client = client
        self._model = model

    async def ask(self, question: Question, planned: Planned, route: str | None = None) -> Heard:
        """Never raises for what happened to the request: that is in what was heard."""
        heard, begun = Heard(), time.monotonic()
        limit_s = HANG_S if planned.leave_s is None else min(planned.leave_s, HANG_S)
        try:
            async with asyncio.timeout(limit_s), aclosing(self._pieces(question, planned.door, route, heard)) as pieces:
                while planned.leave_pieces is None or heard.num_pieces < planned.leave_pieces:
                    if await anext(pieces, None) is None:
                        break
                else:
                    heard.outcome = Outcome.LEFT
        except TimeoutError:
            heard.outcome = Outcome.HUNG if planned.leave_s is None else Outcome.LEFT
        except RequestFailed as error:
            heard.outcome, heard.error = Outcome.FAILED, str(error)
        heard.took_s = time.monotonic() - begun
        return heard

    def _pieces(self, question: Question, door: Door, route: str | None, heard: Heard) -> AsyncGenerator[bool, None]:
        if door is Door.GRPC:
            return self._grpc(question, route, heard)
        return self._http(question, door is Door.SSE, heard)

    async def _grpc(self, question: Question, route: str | None, heard: Heard) -> AsyncGenerator[bool, None]:
        sampling = types_pb2.SamplingParams(
            temperature=0.0 if question.seed is None else TEMPERATURE,
            seed=question.seed,
            max_tokens=question.max_tokens,
            ignore_eos=question.ignore_eos,
            presence_penalty=question.penalty,
        )
        message = inference_pb2.GenerateRequest(
            model=self._model,
            token_ids=inference_pb2.TokenIds(ids=question.prompt),
            sampling=sampling,
            stop=question.stop,
            n=question.n,
            route=_ROUTES[route],
        )
        call = self._stub.Generate(message)
        try:
            async for piece in call:
                heard.piece(piece.index, piece.text, tuple(piece.token_ids), _REASONS.get(piece.finish_reason))
                if piece.HasField("usage"):
                    heard.usage = piece.usage.completion_tokens
                yield True
        except grpc.aio.AioRpcError as error:
            raise RequestFailed(f"{error.code().name}: {error.details()}") from error
        finally:
            call.cancel()

    async def _http(self, question: Question, stream: bool, heard: Heard) -> AsyncGenerator[bool, None]:
        body: dict[str, object] = {
            "model": self._model,
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "temperature": 0.0 if question.seed is None else TEMPERATURE,
            "seed": question.seed,
            "n": question.n,
            "stop": question.stop or None,
            "ignore_eos": question.ignore_eos,
            "presence_penalty": question.penalty,
            "return_token_ids": True,
            "stream": stream,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        try:
            async with self._client.stream("POST", "/v1/completions", content=msgspec.json.encode(body)) as response:
                if response.status_code != httpx.codes.OK:
                    raise RequestFailed(f"{response.status_code}: {(await response.aread()).decode()}")
                if not stream:
                    _take(await response.aread(), heard)
                    yield True
                    return
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        _take(line.removeprefix("data: ").encode(), heard)
                        yield True
        except httpx.HTTPError as error:
            raise RequestFailed(f"{type(error).__name__}: {error}") from error


class _Choice(msgspec.Struct):
    index: int
    text: str
    token_ids: tuple[int, ...] = ()
    finish_reason: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Error(msgspec.Struct):
    message: str
    code: str | None = None


class _Chunk(msgspec.Struct):
    choices: tuple[_Choice, ...] = ()
    usage: _Usage | None = None
    error: _Error | None = None


def _take(data: bytes, heard: Heard) -> None:
    chunk = msgspec.json.decode(data, type=_Chunk)
    if chunk.error is not None:
        raise RequestFailed(f"in the stream, {chunk.error.code}: {chunk.error.message}")
    for choice in chunk.choices:
        heard.piece(choice.index, choice.text, choice.token_ids, choice.finish_reason)
    if chunk.usage is not None:
        heard.usage = chunk.usage.completion_tokens


@asynccontextmanager
async def open_asker(http: str, address: str, model: str) -> AsyncIterator[Asker]:
    """An asker for the router at these addresses."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
    headers = {"Content-Type": "application/json"}
    async with (
        open_channel(address) as channel,
        httpx.AsyncClient(base_url=http, timeout=None, limits=limits, headers=headers, trust_env=False) as client,
    ):
        await channel.channel_ready()
        yield Asker(channel, client, model)
