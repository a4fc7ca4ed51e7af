"""The load client: N requests kept in flight over gRPC or OpenAI's SSE, each event's arrival noted by a monotonic clock.

    LoadPlan ──(a process of its own: `python -m bench client`)──▶ LoadAnswer per request

A closed loop: each of `concurrency` workers sends its next request when its last answer has ended. While answers stream only
arrival times and bytes are kept; they are understood afterwards, so that measuring costs little. It runs beside the servers on
the same cores, so what it does cost is in the numbers. Does not know statistics or bars.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum

import grpc
import httpx
import msgspec

from bench.stats import TokenTimes
from contracts.pb.diptych.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from observability.stages import HandoffStats
from rpc.channel import open_channel

REQUEST_TIMEOUT_S = 300.0


class Protocol(StrEnum):
    """How the router is spoken to."""

    GRPC = "grpc"
    SSE = "sse"


class Route(StrEnum):
    """Which way a request shall go; ANY leaves it to the router. Over SSE only ANY can be asked for."""

    ANY = "any"
    DISAGGREGATED = "disaggregated"
    COLOCATED = "colocated"


@dataclass(frozen=True, slots=True)
class LoadRequest:
    """One prompt in token ids; the answer is greedy and has exactly `max_tokens` tokens."""

    prompt: tuple[int, ...]
    max_tokens: int
    route: Route = Route.ANY


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to send where; requests are sent in order as workers get free."""

    protocol: Protocol
    address: str  # host:port for gRPC, http://host:port for SSE
    model: str
    concurrency: int
    requests: tuple[LoadRequest, ...]


@dataclass(frozen=True, slots=True)
class LoadAnswer:
    """What came back for one request; the last three only over gRPC."""

    times: TokenTimes
    num_tokens: int
    cached_tokens: int
    route: Route = Route.ANY
    handoff: HandoffStats = field(default_factory=HandoffStats)
    token_ids: tuple[int, ...] = ()


Ask = Callable[[LoadRequest], Awaitable[LoadAnswer]]


class LoadFailed(RuntimeError):
    """A request was refused or its answer is not the one that was asked for; then the numbers mean nothing."""


def run_load(plan: LoadPlan) -> tuple[LoadAnswer, ...]:
    """Carry out `plan` in a process of its own; answers in the order of the requests. Raises LoadFailed."""
    command = [sys.executable, "-m", "bench", "client"]
    done = subprocess.run(command, input=msgspec.json.encode(plan), capture_output=True, check=False)
    if done.returncode != 0:
        raise LoadFailed(done.stderr.decode("utf-8", "replace").strip()[-2000:])
    return msgspec.json.decode(done.stdout, type=tuple[LoadAnswer, ...])


def client_main() -> None:
    """The client process: a plan on stdin, answers on stdout."""
    plan = msgspec.json.decode(sys.stdin.buffer.read(), type=LoadPlan)
    import uvloop

    answers = uvloop.run(carry_out(plan))
    sys.stdout.buffer.write(msgspec.json.encode(answers))


async def carry_out(plan: LoadPlan, transport: httpx.AsyncBaseTransport | None = None) -> tuple[LoadAnswer, ...]:
    """Carry out `plan` in this process; over SSE through `transport`, None for the network."""
    if plan.protocol is Protocol.GRPC:
        async with open_channel(plan.address) as channel:
            await channel.channel_ready()
            stub = inference_pb2_grpc.InferenceStub(channel)
            return await _closed_loop(plan, lambda request: _ask_grpc(stub, plan.model, request))
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    client = httpx.AsyncClient(base_url=plan.address, timeout=REQUEST_TIMEOUT_S, limits=limits, transport=transport)
    async with client:
        return await _closed_loop(plan, lambda request: _ask_sse(client, plan.model, request))


async def _closed_loop(plan: LoadPlan, ask: Ask) -> tuple[LoadAnswer, ...]:
    waiting = iter(enumerate(plan.requests))
    answers: dict[int, LoadAnswer] = {}

    async def work() -> None:
        for index, request in waiting:
            answer = await ask(request)
            _check(request, answer)
            answers[index] = answer

    await asyncio.gather(*(work() for _ in range(plan.concurrency)))
    return tuple(answers[index] for index in range(len(plan.requests)))


def _check(request: LoadRequest, answer: LoadAnswer) -> None:
    if answer.num_tokens != request.max_tokens:
        raise LoadFailed(f"asked for {request.max_tokens} tokens, got {answer.num_tokens}")
    if request.route not in (Route.ANY, answer.route):
        raise LoadFailed(f"asked for the {request.route} way, went the {answer.route} one")


_ROUTES = {
    Route.ANY: inference_pb2.ROUTE_UNSPECIFIED,
    Route.DISAGGREGATED: inference_pb2.ROUTE_DISAGGREGATED,
    Route.COLOCATED: inference_pb2.ROUTE_COLOCATED,
}
_ROUTE_NAMES = {value: name for name, value in _ROUTES.items()}


async def _ask_grpc(stub: inference_pb2_grpc.InferenceAsyncStub, model: str, request: LoadRequest) -> LoadAnswer:
    message = inference_pb2.GenerateRequest(
        model=model,
        token_ids=inference_pb2.TokenIds(ids=request.prompt),
        sampling=types_pb2.SamplingParams(temperature=0.0, max_tokens=request.max_tokens, ignore_eos=True),
        route=_ROUTES[request.route],
    )
    arrivals, pieces = [], []
    sent = time.monotonic()
    try:
        async for piece in stub.Generate(message, timeout=REQUEST_TIMEOUT_S):
            arrivals.append(time.monotonic())
            pieces.append(piece)
    except grpc.aio.AioRpcError as error:
        raise LoadFailed(f"{error.code().name}: {error.details()}") from error
    if not pieces:
        raise LoadFailed("the answer had no pieces")
    last = pieces[-1]
    handoff = last.handoff
    return LoadAnswer(
        times=TokenTimes(sent, tuple(arrivals), tuple(len(piece.token_ids) for piece in pieces)),
        num_tokens=sum(len(piece.token_ids) for piece in pieces),
        cached_tokens=last.usage.cached_tokens,
        route=_ROUTE_NAMES[last.route],
        handoff=HandoffStats(
            connector=handoff.connector,
            kv_bytes=handoff.kv_bytes,
            num_writes=handoff.num_writes,
            num_blocks=handoff.num_blocks,
            num_cached_blocks=handoff.num_cached_blocks,
            transfer_s=handoff.transfer_s,
            exposed_s=handoff.exposed_s,
        ),
        token_ids=tuple(token_id for piece in pieces for token_id in piece.token_ids),
    )


async def _ask_sse(client: httpx.AsyncClient, model: str, request: LoadRequest) -> LoadAnswer:
    body = {
        "model": model,
        "prompt": list(request.prompt),
        "max_tokens": request.max_tokens,
        "temperature": 0.0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    arrivals: list[float] = []
    chunks: list[bytes] = []
    sent = time.monotonic()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for chunk in response.aiter_raw():
            arrivals.append(time.monotonic())
            chunks.append(chunk)
    if response.status_code != httpx.codes.OK:
        raise LoadFailed(f"HTTP {response.status_code}: {b''.join(chunks)[:500].decode('utf-8', 'replace')}")
    return sse_answer(sent, arrivals, chunks)


class SseUsage(msgspec.Struct):
    """Of OpenAI's usage, what is counted."""

    completion_tokens: int


class SseError(msgspec.Struct):
    """OpenAI's error object."""

    message: str


class SseEvent(msgspec.Struct):
    """Of OpenAI's streamed completion object, what is counted."""

    choices: list[object] = []
    usage: SseUsage | None = None
    error: SseError | None = None


def sse_answer(sent_s: float, arrivals_s: list[float], chunks: list[bytes]) -> LoadAnswer:
    """Read a completion's stream of chunks that came at `arrivals_s`. Raises LoadFailed for an error event.

    Events do not say how many tokens they bring: one each is assumed until the tokens of the usage are spent; what is left
    over came with the last, so that the totals and the first token's time are right.
    """
    times, usage = [], None
    for arrived, data in _events(arrivals_s, chunks):
        event = msgspec.json.decode(data, type=SseEvent)
        if event.error is not None:
            raise LoadFailed(event.error.message)
        usage = event.usage or usage
        if event.choices:
            times.append(arrived)
    if usage is None or not times:
        raise LoadFailed("the stream ended without tokens or without usage")
    left = usage.completion_tokens
    counts = []
    for _ in times:
        counts.append(min(1, left))
        left -= counts[-1]
    counts[-1] += left
    return LoadAnswer(TokenTimes(sent_s, tuple(times), tuple(counts)), usage.completion_tokens, 0)


def _events(arrivals_s: list[float], chunks: list[bytes]) -> Iterator[tuple[float, bytes]]:
    """The data of each server-sent event but [DONE], with the time at which its last byte came."""
    rest = b""
    for arrived, chunk in zip(arrivals_s, chunks, strict=True):
        *events, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            lines = [line[5:].lstrip() for line in event.split(b"\n") if line.startswith(b"data:")]
            data = b"\n".join(lines)
            if data and data != b"[DONE]":
                yield arrived, data
