"""Workers that answer at once, to measure a router by itself: one process with a prefill and a decode worker, no model.

    Prefill.Session: run ──▶ first token, handed_off, ended         without computing anything
    Decode.Session: attach, generate ──▶ one DecodeBatch per step with a token for every request that runs

A step comes every `step_s` seconds, or with 0 as fast as the router takes the batch before: a batch is made when gRPC has
taken the last one, so its flow control is what holds the worker back. Messages are made with as little work as possible, so
that the router is what is measured. Does not know who asks, or why.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

import grpc

from contracts.clock import MonotonicClock
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2, prefill_pb2_grpc, types_pb2
from contracts.sampling import MAX_LOGPROBS
from contracts.wire_handoff import worker_ref_to_pb
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from rpc.announce import Announcer, GrpcRegistryClient
from rpc.channel import MAX_MESSAGE_BYTES

HOST = "127.0.0.1"
LAYOUT = KVLayout("fake", "bfloat16", num_layers=1, num_kv_heads=1, head_size=64, block_size=16)
NUM_BLOCKS = 1_000_000  # tokens are not kept, so there is always room
MAX_MODEL_LEN = 1_000_000
_AT_ONCE = 512
FAKE_PREFILL = "fake-prefill"
FAKE_EPOCH = 1
_OPTIONS = [
    ("grpc.so_reuseport", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.http2.min_ping_interval_without_data_ms", 1000),
    ("grpc.http2.max_ping_strikes", 0),
]
_PrefillContext = grpc.aio.ServicerContext[AsyncIterator[prefill_pb2.PrefillCommand], prefill_pb2.PrefillBatch]
_DecodeContext = grpc.aio.ServicerContext[AsyncIterator[decode_pb2.DecodeCommand], decode_pb2.DecodeBatch]


@dataclass(frozen=True, slots=True)
class FakeConfig:
    """`first_token_id` to `last_token_id` are the tokens that answers go through, again and again."""

    router: str  # host:port
    model_name: str
    step_s: float = 0.0
    prefill_port: int = 0
    first_token_id: int = 300
    last_token_id: int = 1300

    def token(self, index: int) -> int:
        """The token of an answer at `index`."""
        return self.first_token_id + index % (self.last_token_id - self.first_token_id)


@dataclass(slots=True)
class _Running:
    """One answer: the index of its next token, and where it ends."""

    index: int
    max_tokens: int


@dataclass(slots=True)
class _Handoffs:
    """What was prefilled, until somebody attaches to it."""

    committed: dict[str, asyncio.Future[_Running]] = field(default_factory=dict)

    def of(self, handoff_id: str) -> asyncio.Future[_Running]:
        return self.committed.setdefault(handoff_id, asyncio.get_running_loop().create_future())


class _Prefill(prefill_pb2_grpc.PrefillServicer):
    def __init__(self, config: FakeConfig, ref: WorkerRef, handoffs: _Handoffs) -> None:
        self._config = config
        self._ref = worker_ref_to_pb(ref)
        self._handoffs = handoffs
        self._weights: dict[int, list[types_pb2.TokenLogprob]] = {}

    async def Session(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: _PrefillContext
    ) -> AsyncIterator[prefill_pb2.PrefillBatch]:
        """Answers each prompt at once, in one batch."""
        del context
        async for command in request_iterator:
            if command.WhichOneof("command") == "run":
                yield prefill_pb2.PrefillBatch(prefill=self._ref, events=await self._answer(command.run))

    async def _answer(self, run: prefill_pb2.PrefillRun) -> list[prefill_pb2.PrefillEvent]:
        """An answer of one token ends here."""
        name = run.request.request_id
        begin = len(run.request.output_token_ids)
        ends = begin + 1 >= run.request.sampling.max_tokens
        tokens = types_pb2.TokenDelta(
            request_id=run.request.request_id,
            first_index=begin,
            token_ids=(self._config.token(begin),),
            finish_reason=types_pb2.FINISH_REASON_LENGTH if ends else types_pb2.FINISH_REASON_UNSPECIFIED,
            stages=types_pb2.StageTimes(),
        )
        if run.request.sampling.HasField("prompt_logprobs"):
            entries = self._weighed(len(run.request.prompt_token_ids))
            for at in range(0, len(entries), _AT_ONCE):  # the decode worker of this process has its steps to make
                tokens.prompt_logprobs.extend(entries[at : at + _AT_ONCE])
                await asyncio.sleep(0)
        if run.request.sampling.HasField("logprobs"):
            tokens.logprobs.extend(self._weighed(2)[1:])
        events = [prefill_pb2.PrefillEvent(request_id=name, tokens=tokens)]
        ended = prefill_pb2.PrefillEvent(request_id=name, ended=prefill_pb2.PrefillEnded())
        if ends:
            return [*events, ended]
        target = run.target.handoff_id
        self._handoffs.of(target).set_result(_Running(begin + 1, run.request.sampling.max_tokens))
        done = prefill_pb2.HandedOff(
            handoff_id=target, stats=types_pb2.HandoffStats(connector="local"), stages=types_pb2.StageTimes()
        )
        return [*events, prefill_pb2.PrefillEvent(request_id=name, handed_off=done), ended]

    def _weighed(self, num_tokens: int) -> list[types_pb2.TokenLogprob]:
        """Of a prompt whose every token has the same alternatives; made once for each length, for it takes its time."""
        if num_tokens not in self._weights:
            top = [types_pb2.TokenProbability(token_id=300 + i, logprob=-0.5 * i) for i in range(MAX_LOGPROBS)]
            entry = types_pb2.TokenLogprob(token_id=299, logprob=-12.5, rank=30, top=top)
            self._weights[num_tokens] = [types_pb2.TokenLogprob(), *[entry] * (num_tokens - 1)]
        return self._weights[num_tokens]


class _Decode(decode_pb2_grpc.DecodeServicer):
    def __init__(self, config: FakeConfig, ref: WorkerRef, handoffs: _Handoffs) -> None:
        self._config = config
        self._ref = worker_ref_to_pb(ref)
        self._handoffs = handoffs

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: _DecodeContext
    ) -> AsyncIterator[decode_pb2.DecodeBatch]:
        """One batch per step, as long as anything runs."""
        del context
        running: dict[str, _Running] = {}
        news = asyncio.Event()
        listening = asyncio.ensure_future(self._listen(request_iterator, running, news))
        next_step = 0.0
        clock = asyncio.get_running_loop().time
        try:
            while True:
                while not running:
                    news.clear()
                    await news.wait()
                if self._config.step_s:
                    next_step = max(next_step + self._config.step_s, clock())
                    await asyncio.sleep(next_step - clock())
                batch = self._step(running)
                if batch.deltas:  # else all were cancelled while the step ran
                    yield batch
        finally:
            listening.cancel()

    def _step(self, running: dict[str, _Running]) -> decode_pb2.DecodeBatch:
        batch = decode_pb2.DecodeBatch(decode=self._ref)
        ended = []
        for request_id, answer in running.items():
            index = answer.index
            answer.index = index + 1
            delta = batch.deltas.add(request_id=request_id, first_index=index, token_ids=(self._config.token(index),))
            if answer.index >= answer.max_tokens:
                delta.finish_reason = types_pb2.FINISH_REASON_LENGTH
                delta.stages.SetInParent()
                ended.append(request_id)
        for request_id in ended:
            del running[request_id]
        return batch

    async def _listen(
        self, commands: AsyncIterator[decode_pb2.DecodeCommand], running: dict[str, _Running], news: asyncio.Event
    ) -> None:
        def begin(request_id: str, answer: _Running) -> None:
            running[request_id] = answer
            news.set()

        waiting: dict[str, asyncio.Future[_Running]] = {}
        async for command in commands:
            match command.WhichOneof("command"):
                case "attach":
                    ident = command.attach.handoff_id
                    waiting[ident] = self._handoffs.of(ident)

                    def committed(done: asyncio.Future[_Running], ident: str = ident) -> None:
                        del self._handoffs.committed[ident]
                        if waiting.pop(ident, None) is not None and not done.cancelled():
                            begin(ident, done.result())

                    waiting[ident].add_done_callback(committed)
                case "generate":
                    request = command.generate.request
                    begin(request.request_id, _Running(len(request.output_token_ids), request.sampling.max_tokens))
                case "cancel":
                    for ident in command.cancel.request_ids:
                        running.pop(ident, None)
                        waiting.pop(ident, None)


class FakeWorkers:
    """A prefill and a decode worker on ports of their own. Owns servers and announcements from `start` to `stop`."""

    def __init__(self, config: FakeConfig) -> None:
        self._config = config
        self._servers: list[grpc.aio.Server] = []
        self._announcing: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve, and announce both to the router until it has heard them."""
        handoffs = _Handoffs()
        for kind in WorkerKind:
            ref = WorkerRef(f"fake-{kind.value}", FAKE_EPOCH)
            server = grpc.aio.server(options=_OPTIONS)
            port = self._config.prefill_port if kind is WorkerKind.PREFILL else 0
            if kind is WorkerKind.PREFILL:
                prefill_pb2_grpc.add_PrefillServicer_to_server(_Prefill(self._config, ref, handoffs), server)
            else:
                decode_pb2_grpc.add_DecodeServicer_to_server(_Decode(self._config, ref, handoffs), server)
            port = server.add_insecure_port(f"{HOST}:{port}")
            await server.start()
            self._servers.append(server)
            info = WorkerInfo(
                ref, kind, f"{HOST}:{port}", self._config.model_name, LAYOUT, ("local",), MAX_MODEL_LEN, NUM_BLOCKS
            )
            announcer = Announcer(GrpcRegistryClient(self._config.router), info, WorkerLoad, MonotonicClock())
            self._announcing.append(asyncio.ensure_future(announcer.run()))

    async def stop(self) -> None:
        """End at once; what runs is lost."""
        for task in self._announcing:
            task.cancel()
        for server in self._servers:
            await server.stop(None)


async def serve_until_signal(config: FakeConfig) -> None:
    """A process's whole life."""
    asked = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, asked.set)
    workers = FakeWorkers(config)
    await workers.start()
    try:
        await asked.wait()
    finally:
        with contextlib.suppress(grpc.aio.BaseError):
            await workers.stop()
