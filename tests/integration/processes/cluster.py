"""Two prefill workers, two decode workers and a router as real processes, with a proxy before every door.

    client ──▶ [http] router [grpc] ◀── workers announce        router ──▶ [grpc] prefill-*, [grpc] decode-* ◀── prefill-*
                                                                prefill-* ──▶ [kv] decode-*      (tcp; shm has no door)

Workers announce their proxies' addresses, so nobody meets another but through one. Whoever was killed is started again by
`whole`, on the same ports. A worker that nobody routes to, `oracle`, says what every answer should be. Knows no tests.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import signal
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import grpc
import httpx
from prometheus_client.parser import text_string_to_metric_families

from cli.ports import KeptPort, keep_port
from contracts import wire
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from decode_service.config import DecodeConfig
from decode_service.worker import AnswerConfig
from engine.build import ModelRuntimeConfig
from engine.config import SchedulerConfig
from kv_transfer.choose import NetworkConfig
from kv_transfer.config import Integrity, ReceiverConfig, SenderConfig
from prefill_service.config import PrefillConfig
from prefill_service.run import RunConfig
from router.config import (
    CanaryConfig,
    DisaggregationConfig,
    DisaggregationMode,
    HttpConfig,
    RegistryConfig,
    RouterConfig,
)
from rpc.announce import AnnounceConfig
from rpc.channel import open_channel
from rpc.server import ServerConfig
from tests.integration.processes.children import Child, Config
from tests.integration.processes.client import TEMPERATURE, TOP_K, Answer, Client, Question
from tests.integration.processes.messages import run_of
from tests.integration.processes.proxy import AnyBytes, GrpcBytes, Passing, Proxy, Trap, links_of, open_all
from worker.config import WorkerConfig

TINY = Path(__file__).resolve().parents[2] / "fixtures" / "tiny-austen"
WORKERS = ("prefill-0", "prefill-1", "decode-0", "decode-1")
PATIENCE_S = 60.0  # on a very crowded machine
_BLOCK_BYTES = 32 << 10


@dataclass(frozen=True)
class Setup:
    """What differs between clusters. A prefill worker's pool holds 64 blocks of 16 tokens, a decode worker's four times that."""

    connector: str = "tcp"
    chunk: int = 16  # most tokens of a prefill step
    sender: SenderConfig = field(default_factory=lambda: SenderConfig(integrity=Integrity.SAMPLED))
    receiver: ReceiverConfig = field(default_factory=lambda: ReceiverConfig(integrity=Integrity.SAMPLED))
    registry: RegistryConfig = field(default_factory=RegistryConfig)
    canary: CanaryConfig = field(
        default_factory=lambda: CanaryConfig(interval_s=0.0)
    )  # off: they would step into traps


@dataclass
class Doors:
    """The ports that a process listens at, and the proxies before them."""

    ports: dict[str, KeptPort]
    proxies: dict[str, Proxy] = field(default_factory=dict)

    def address(self, door: str) -> str:
        """Where the others find it."""
        return f"127.0.0.1:{self.proxies[door].port}"


class Starter(Protocol):
    """What starts processes."""

    async def start(self, name: str, config: Config) -> Child:
        """Start one that serves this configuration; it is not ready yet."""
        ...


class Cluster:
    """See the module. Make it with `cluster`."""

    patience_s = PATIENCE_S

    def __init__(self, setup: Setup, nursery: Starter) -> None:
        self.setup = setup
        self.children: dict[str, Child] = {}
        self.doors: dict[str, Doors] = {}
        self.traps: list[Trap] = []
        self.routes: dict[tuple[int, ...], list[tuple[str, str]]] = {}  # prompt → (prefill, decode) of each attempt
        self.client = Client(0)
        self._nursery = nursery
        self._epochs: dict[str, int] = {}
        self._numbers = itertools.count()
        self._http = httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S)
        self._watch = Trap(self._note_route, hold=False)
        self._shm = set(os.listdir("/dev/shm"))

    async def open(self, stack: AsyncExitStack) -> None:
        """Take ports, start proxies and processes."""
        for name in (*WORKERS, "router", "oracle"):
            kinds = ("http", "grpc") if name == "router" else ("grpc", "kv", "metrics")
            doors = self.doors[name] = Doors({kind: keep_port("127.0.0.1", 0, "") for kind in kinds})
            for port in doors.ports.values():
                stack.callback(port.release)
            for kind in [k for k in kinds if k != "metrics"]:
                cutter = GrpcBytes if kind == "grpc" and name != "router" else AnyBytes
                proxy = Proxy(f"{name}.{kind}", doors.ports[kind].port, self.traps, self._pids, cutter)
                await proxy.start()
                stack.push_async_callback(proxy.stop)
                doors.proxies[kind] = proxy
        self.client = Client(self.doors["router"].proxies["http"].port)
        stack.push_async_callback(self.client.close)
        stack.push_async_callback(self._http.aclose)
        self.traps.append(self._watch)
        self.children["oracle"] = await self._nursery.start("oracle", self.config("oracle"))
        await self.whole()

    def config(self, name: str) -> Config:
        """What the process of this name is told."""
        doors = self.doors[name]
        if name == "router":
            http, grpc = HttpConfig(port=doors.ports["http"].port), ServerConfig(port=doors.ports["grpc"].port)
            return RouterConfig(
                model_dir=TINY,
                model_name=TINY.name,
                http=http,
                grpc=grpc,
                registry=self.setup.registry,
                canary=self.setup.canary,
                disaggregation=DisaggregationConfig(DisaggregationMode.ALWAYS),
            )
        prefill = name.startswith("prefill")
        tokens, num_blocks = (self.setup.chunk, 64) if prefill else (64, 256)
        scheduler = SchedulerConfig(max_num_batched_tokens=tokens, max_num_seqs=16)
        worker = WorkerConfig(
            worker_id=name,
            model_name=TINY.name,
            model=ModelRuntimeConfig(TINY, threads=1, max_num_batched_tokens=tokens, max_num_seqs=16),
            scheduler=scheduler,
            kv_memory_bytes=num_blocks * _BLOCK_BYTES,
            connectors=(self.setup.connector,),
            network=self._network(doors),
            server=ServerConfig(port=doors.ports["grpc"].port, advertise=doors.address("grpc")),
            routers=() if name == "oracle" else (self.doors["router"].address("grpc"),),
            announce=AnnounceConfig(interval_s=0.25, max_backoff_s=0.5),
            metrics_port=doors.ports["metrics"].port,
        )
        if prefill:
            return PrefillConfig(worker, RunConfig(self.setup.sender))
        return DecodeConfig(worker, AnswerConfig(self.setup.receiver))

    def _network(self, doors: Doors) -> NetworkConfig:
        """KV goes through a proxy where it goes through one connection; what UCX opens has none before it."""
        if self.setup.connector == "nixl":
            return NetworkConfig()
        return NetworkConfig(port=doors.ports["kv"].port, advertise_port=doors.proxies["kv"].port)

    async def whole(self) -> None:
        """Start who is dead; return when the router would choose from all, in their present lives, and all is idle."""
        open_all(trap for trap in self.traps if trap is not self._watch)
        self.traps[:] = [self._watch]
        for name in self.children:
            self.thaw(name)  # what a test that failed has left
        for name in (*WORKERS, "router"):
            child = self.children.get(name)
            if child is None or child.ended.is_set():
                self.children[name] = await self._nursery.start(name, self.config(name))
                self._epochs[name] = self._epochs.get(name, 0) + 1
        await self.until(self._is_whole, "all workers are known to the router")
        self._epochs = await self._known()
        await self.idle()

    async def idle(self, names: Iterable[str] = WORKERS) -> None:
        """Wait until these hold no block and no request."""

        async def all_idle() -> bool:
            loads = [await self.load(name) for name in names]
            return all(value == 0 for load in loads for value in load)

        await self.until(all_idle, "every block is back")

    async def load(self, name: str) -> tuple[float, float, float]:
        """Waiting, running, share of KV in use, as a worker's own metrics say now."""
        m = await self.metrics(name)
        of = "diptych_engine_"
        return m[f"{of}waiting_requests"], m[f"{of}running_requests"], m[f"{of}kv_usage_ratio"]

    async def metrics(self, name: str) -> dict[str, float]:
        """Every series of a worker that has no labels."""
        text = (await self._http.get(f"http://127.0.0.1:{self.doors[name].ports['metrics'].port}/metrics")).text
        families = text_string_to_metric_families(text)
        return {sample.name: sample.value for family in families for sample in family.samples if not sample.labels}

    def trap(
        self, at: Callable[[Passing], bool], act: Callable[[Passing], None] = lambda _: None, *, hold: bool = True
    ) -> Trap:
        """Set a trap on every connection; `whole` takes it away."""
        made = Trap(at, act, hold)
        self.traps.append(made)
        return made

    def freeze(self, name: str) -> None:
        """Stop a process where it is."""
        self.children[name].signal(signal.SIGSTOP)

    def thaw(self, name: str) -> None:
        """Let it go on."""
        self.children[name].signal(signal.SIGCONT)

    def cut(self, name: str, peer: str | None = None) -> int:
        """Cut every connection that this process has, or those between it and `peer`; how many they were."""
        cut = 0
        for owner, doors in self.doors.items():
            for proxy in doors.proxies.values():
                if owner == name:
                    cut += proxy.cut(peer)
                elif peer is None or owner == peer:
                    cut += proxy.cut(name)
        return cut

    async def truth(self, asked: Question) -> list[int]:
        """The tokens that one engine alone gives."""
        seed = asked.seed
        sampling = SamplingParams(temperature=0.0, max_tokens=asked.max_tokens, ignore_eos=True)
        if seed is not None:
            sampling = replace(sampling, temperature=TEMPERATURE, top_k=TOP_K, seed=seed)
        request = wire.request_to_pb(GenerationRequest(f"truth-{next(self._numbers)}", asked.prompt, sampling))
        async with open_channel(self.doors["oracle"].ports["grpc"].local_address) as channel:
            stub = decode_pb2_grpc.DecodeStub(channel)
            ref = types_pb2.WorkerRef(worker_id="oracle", epoch=await _epoch(stub, "oracle"))
            alone = decode_pb2.DecodeCommand(decode=ref, generate=decode_pb2.GenerateAlone(request=request))
            session = stub.Session(_one(alone))
            token_ids = [int(i) async for batch in session for delta in batch.deltas for i in delta.token_ids]
        assert len(token_ids) == asked.max_tokens
        return token_ids

    async def route(self, answer: Answer) -> tuple[str, str]:
        """(prefill worker, decode worker) of the answer's first attempt, once the router has chosen."""

        async def known() -> bool:
            return answer.question.prompt in self.routes

        await self.until(known, "the router has chosen")
        return self.routes[answer.question.prompt][0]

    async def until(self, condition: Callable[[], object], what: str) -> None:
        """Wait for an async condition, at most `patience_s`."""
        try:
            async with asyncio.timeout(self.patience_s):
                while not await condition():  # type: ignore[misc]
                    await asyncio.sleep(0.015)
        except TimeoutError:
            raise AssertionError(f"not within {self.patience_s} s: {what}\n{self.logs()}") from None

    def logs(self) -> str:
        """The end of every process's log."""
        ends = (f"--- {c.name} ---\n" + "\n".join(c.log.read_text().splitlines()[-12:]) for c in self.children.values())
        return "\n".join(ends)

    def check_nothing_leaked(self) -> None:
        """No process died by itself, no door of a dead one is open, and no memory of a dead one is held by the living."""
        assert all(not child.ended.is_set() for child in self.children.values()), self.logs()
        assert set(os.listdir("/dev/shm")) <= self._shm
        pids = self._pids()
        if self.setup.connector == "shm":
            names = _doors_of(pids.values())
            assert len(names) == len(pids) - 1, names  # one of each worker and none of the router
        memories = {memory for pid in pids.values() for memory in _memories_of(pid)}
        own = 2 if self.setup.connector == "shm" else 1  # KV, and the table of windows
        assert len(memories) == own * (len(pids) - 1), memories

    async def end(self) -> None:
        """Kill every process."""
        for child in self.children.values():
            child.signal(signal.SIGKILL)
            await child.ended.wait()

    def _pids(self) -> dict[str, int]:
        return {name: child.pid for name, child in self.children.items() if not child.ended.is_set()}

    def _note_route(self, passing: Passing) -> bool:
        run = run_of(passing)
        if run is not None:
            to = (passing.link.proxy.name.partition(".")[0], run.target.decode.worker_id)
            self.routes.setdefault(tuple(run.request.prompt_token_ids), []).append(to)
        return False

    async def _is_whole(self) -> bool:
        dead = [child.name for child in self.children.values() if child.ended.is_set()]
        assert not dead, f"{', '.join(dead)} ended at the start\n{self.logs()}"
        try:
            known = await self._known()
        except httpx.TransportError:
            return False
        return all(known.get(name, -1) >= self._epochs[name] for name in WORKERS)

    async def _known(self) -> dict[str, int]:
        """The epochs of those that the router would choose from, -1 if one of a pool is not ready; router's is its life."""
        port = self.doors["router"].ports["http"].port
        text = (await self._http.get(f"http://127.0.0.1:{port}/metrics")).text
        samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
        ready = {
            s.labels["pool"]: s.value for s in samples if s.name == "diptych_workers" and s.labels["state"] == "ready"
        }
        epochs = {s.labels["worker_id"]: int(s.value) for s in samples if s.name == "diptych_worker_epoch"}
        whole = ready == {"prefill": 2, "decode": 2}
        return {"router": self._epochs.get("router", 0), **(epochs if whole else {})}


@asynccontextmanager
async def cluster(setup: Setup, nursery: Starter) -> AsyncIterator[Cluster]:
    """A whole cluster; nothing of it is left afterwards."""
    async with AsyncExitStack() as stack:
        made = Cluster(setup, nursery)
        stack.push_async_callback(made.end)
        await made.open(stack)
        yield made


async def _epoch(stub: decode_pb2_grpc.DecodeAsyncStub, worker_id: str) -> int:
    """Of a worker that announces itself to nobody: it names its life where it refuses a command for another."""
    nobody = types_pb2.WorkerRef(worker_id=worker_id)
    try:
        async for _ in stub.Session(_one(decode_pb2.DecodeCommand(decode=nobody, cancel=decode_pb2.Cancel()))):
            raise AssertionError("it obeys a command for another life")
    except grpc.aio.AioRpcError as error:
        named = re.search(r"expected (\d+)", error.details() or "")
        assert named is not None, error
        return int(named[1])
    raise AssertionError("it does not refuse a command for another life")


async def _one(command: decode_pb2.DecodeCommand) -> AsyncIterator[decode_pb2.DecodeCommand]:
    yield command


def _doors_of(pids: Iterable[int]) -> set[str]:
    """Names of the abstract sockets of the shm connector that are open on this machine, among these processes' own."""
    inodes = {link.partition("[")[2][:-1] for pid in pids for link in links_of(pid) if link.startswith("socket:[")}
    lines = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
    return {line[7] for line in lines if len(line) > 7 and line[7].startswith("@diptych-") and line[6] in inodes}


def _memories_of(pid: int) -> set[str]:
    """KV memories and window tables that a process has mapped, by their inode."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
    return {line[4] for line in lines if len(line) > 5 and line[5].startswith("/memfd:diptych")}
