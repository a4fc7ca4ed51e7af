"""A real router with its HTTP and gRPC doors, and in front of it, for each question, workers that have never been asked.

    house(tmp_path) ──▶ House.crew(hold_at) ──▶ Crew: one prefill worker, two decode workers, each behind a line that can be cut
                                                  └── cut ──▶ the decode worker that holds its breath is gone, without a word

New workers for each question make what it meets (prefix caches, who is asked first) the same whatever was asked before.
The model is the tiny real one. The tokenizer adds a beginning-of-sequence token, and so does the chat template.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import openai

from contracts.clock import MonotonicClock
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import inference_pb2_grpc
from contracts.worker import WorkerInfo, WorkerKind
from engine.build import ModelRuntimeConfig, load
from engine.config import SchedulerConfig
from engine.engine import EngineStats
from engine.execution.interface import ModelRunner, ScheduledBatch
from engine.execution.torch_runner import TorchRunner
from engine.models.decoder import Decoder
from engine.models.loader import load_model
from engine.sampling.row import SampledToken
from kv_transfer.local import WriteFault
from router.config import RegistryConfig
from router.server import RouterServer
from router.text.model_card import ModelCard, load_model_card
from rpc.announce import GrpcRegistryClient
from rpc.channel import open_channel
from tests.equivalence.truth import TINY
from tests.integration.pools import PATIENCE_S, Pools, RealModel, Served, Setup, pools
from tests.integration.router_harness import MODEL, model_dir, router_config

BOS, EOS = 0, 1
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
NUM_BLOCKS = 40
BLOCK_SIZE = 16
SCHEDULER = SchedulerConfig(
    max_num_batched_tokens=24, max_num_seqs=8
)  # less than most prompts here, so that they are read in chunks


class Breath:
    """What the decode workers of a crew share: the first that would make token number `hold_at` waits until it is cut off."""

    def __init__(self) -> None:
        self.hold_at: int | None = None
        self.holds_transfers = False  # of the first prefill worker
        self.seeds: set[int] = set()  # that were drawn with
        self.held: asyncio.Future[int] = asyncio.get_running_loop().create_future()  # which of them
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._holder: int | None = None
        self._go = threading.Event()

    def breathe(self, index: int, batch: ScheduledBatch) -> None:
        """In the thread of decode worker `index`, before it computes."""
        self.seeds.update(request.sampling.seed for request in batch.requests)
        if self.hold_at is None or all(r.num_output_tokens < self.hold_at for r in batch.requests if r.samples):
            return
        with self._lock:
            if self._holder is not None:
                return
            self._holder = index
        self._loop.call_soon_threadsafe(self.held.set_result, index)
        assert self._go.wait(PATIENCE_S), "nobody let it go on"

    def let_go(self) -> None:
        """It may go on; nobody hears it any more."""
        self._go.set()


class BreathingRunner:
    """A decode worker's model, which may be held in front of a step."""

    def __init__(self, runner: ModelRunner, index: int, breath: Breath) -> None:
        self._runner, self._index, self._breath = runner, index, breath
        self.layout: KVLayout = runner.layout
        self.num_blocks, self.vocab_size = runner.num_blocks, runner.vocab_size
        self.max_model_len, self.eos_token_ids = runner.max_model_len, runner.eos_token_ids

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        self._breath.breathe(self._index, batch)
        return self._runner.execute(batch)


class Line:
    """A TCP line to a server that can be cut: both ends see their connections reset, and nobody is reached any more."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._is_cut = False

    def open(self) -> int:
        """Not an asyncio.Server: one that is closed right after an accept forgets the socket, and its end waits for ever."""
        asyncio.get_running_loop().add_reader(self._listener, self._accept)
        return int(self._listener.getsockname()[1])

    async def cut(self) -> None:
        """Idempotent."""
        if not self._is_cut:
            self._is_cut = True
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for writer in self._writers:
            writer.transport.abort()
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    def _accept(self) -> None:
        with suppress(BlockingIOError, ConnectionError):  # it has left again
            self._do(self._connect(self._listener.accept()[0]))

    def _do(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, here: socket.socket) -> None:
        reader, writer = await asyncio.open_connection(sock=here)
        self._writers.add(writer)
        try:
            there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers.add(there_writer)
        for source, sink in ((reader, there_writer), (there_reader, writer)):
            self._do(self._pump(source, sink))
            if self._is_cut:  # while the connection was made
                sink.transport.abort()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        sink.transport.abort()
        self._writers.discard(sink)


@dataclass
class Crew:
    """The workers of one question."""

    pools: Pools
    breath: Breath
    lines: list[Line]  # to the decode workers, and to the first prefill worker
    announce_spare: Callable[[], Awaitable[None]]
    lost: list[Served] = field(default_factory=list)

    async def cut(self) -> None:
        """Cut off the decode worker that is held."""
        async with asyncio.timeout(PATIENCE_S):
            index = await self.breath.held
        await self.lines[index].cut()
        self.lost.append(self.pools.decode[index])
        self.breath.let_go()

    async def cut_prefill(self) -> None:
        """Cut off the prefill worker. Another takes its place, which nobody knew before."""
        await self.lines[-1].cut()
        self.lost.append(self.pools.prefill[0])
        await self.announce_spare()

    async def idle(self) -> None:
        """Nothing is left on the workers that were not lost: nobody can tell those what has become of their leases."""
        for served in (*self.pools.prefill, *self.pools.decode):
            if served not in self.lost:
                await served.idle()

    async def stats(self, pool: Sequence[Served]) -> list[EngineStats]:
        """What each engine of a pool has done."""
        return [await served.worker.driver.call(lambda engine: engine.stats()) for served in pool]


@dataclass
class House:
    """The router, and its two doors as clients see them."""

    card: ModelCard
    client: openai.AsyncOpenAI
    stub: inference_pb2_grpc.InferenceStub
    registry: GrpcRegistryClient
    epochs: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @asynccontextmanager
    async def crew(
        self, num_blocks: int = NUM_BLOCKS, context: int = NUM_BLOCKS * BLOCK_SIZE, *, spare: bool = False
    ) -> AsyncIterator[Crew]:
        """Workers until the block ends; then nothing may be left on any of them. They say that they have this context."""
        breath, lines = Breath(), list[Line]()
        setup = Setup(
            num_prefill=1 + spare,
            num_decode=2,
            prefill_blocks=num_blocks,
            decode_blocks=num_blocks,
            scheduler=SCHEDULER,
            real=_breathing(breath, num_decode=2),
            faults=lambda _: WriteFault(delay_s=PATIENCE_S if breath.holds_transfers else 0.0),
            epoch=next(self.epochs),
        )
        async with AsyncExitStack() as stack:
            made = await stack.enter_async_context(pools(setup))
            stack.callback(breath.let_go)
            size = (num_blocks, context)
            for worker, kind in (*((w, WorkerKind.DECODE) for w in made.decode), (made.prefill[0], WorkerKind.PREFILL)):
                lines.append(Line(worker.server.port))
                stack.push_async_callback(lines[-1].cut)
                await self._announce(worker, kind, lines[-1].open(), size, stack)

            async def announce_spare() -> None:
                worker = made.prefill[1]
                await self._announce(worker, WorkerKind.PREFILL, worker.server.port, size, stack)

            crew = Crew(made, breath, lines, announce_spare)
            yield crew
            await crew.idle()

    async def _announce(
        self, worker: Served, kind: WorkerKind, port: int, size: tuple[int, int], stack: AsyncExitStack
    ) -> None:
        num_blocks, context = size
        _, layout = loaded()
        info = WorkerInfo(worker.ref, kind, f"127.0.0.1:{port}", MODEL, layout, ("local",), context, num_blocks)
        await self.registry.announce(info, worker.worker.load())
        stack.push_async_callback(self.registry.leave, worker.ref)


@cache
def loaded() -> tuple[Decoder, KVLayout]:
    """The tiny model and the layout of its KV memory."""
    layout = load(ModelRuntimeConfig(TINY, dtype="float32", threads=1)).layout
    return load_model(TINY, "float32"), layout


def _breathing(breath: Breath, num_decode: int) -> RealModel:
    """The tiny model; the first `num_decode` runners that are made of it are those of decode workers."""
    (model, layout), numbers = loaded(), itertools.count()

    def runner(num_blocks: int, buffer: memoryview) -> ModelRunner:
        """Not warmed up: the model is put on KV memory two thousand times, and only the first steps of all are slow."""
        capacity = min(model.config.context_len, num_blocks * layout.block_size)
        index, plain = next(numbers), TorchRunner(model, layout, buffer, num_blocks, capacity)
        return BreathingRunner(plain, index, breath) if index < num_decode else plain

    return RealModel(layout, runner)


def model_dir_with_bos(tmp_path: Path) -> Path:
    """The tiny model's files with a tokenizer and a chat template that both begin with BOS."""
    directory = tmp_path / "with-bos"
    directory.mkdir()
    target = model_dir(directory)
    tokenizer = json.loads((target / "tokenizer.json").read_text())
    bos = {"SpecialToken": {"id": "<|bos|>", "type_id": 0}}
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [bos, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|bos|>": {"id": "<|bos|>", "ids": [BOS], "tokens": ["<|bos|>"]}},
    }
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    words = {"chat_template": TEMPLATE, "bos_token": "<|bos|>", "eos_token": "<|eos|>"}
    (target / "tokenizer_config.json").write_text(json.dumps(words))
    return target


@asynccontextmanager
async def house(tmp_path: Path) -> AsyncIterator[House]:
    config = router_config(tmp_path, registry=RegistryConfig(ttl_s=60.0), model_dir=model_dir_with_bos(tmp_path))
    card = load_model_card(config.model_dir, config.model_name)
    router = RouterServer(config, MonotonicClock())
    ports = await router.start()
    async with AsyncExitStack() as stack:
        stack.push_async_callback(router.stop)
        channel = await stack.enter_async_context(open_channel(f"127.0.0.1:{ports.grpc}"))
        registry = GrpcRegistryClient(f"127.0.0.1:{ports.grpc}")
        stack.push_async_callback(registry.close)
        url = f"http://127.0.0.1:{ports.http}/v1"
        client = await stack.enter_async_context(openai.AsyncOpenAI(base_url=url, api_key="none", max_retries=0))
        yield House(card, client, inference_pb2_grpc.InferenceStub(channel), registry)
