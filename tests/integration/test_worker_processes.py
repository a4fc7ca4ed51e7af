"""Prefill and decode workers as processes of their own, with a real (tiny) model: tokens, kills, drains, exit codes."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

from contracts import wire_handoff
from contracts.pb.diptych.v1 import prefill_pb2, registry_pb2, registry_pb2_grpc
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerLoad
from engine.execution.memory import memory_turn
from rpc.channel import open_channel
from rpc.server import RpcServer, ServerConfig
from tests.integration.pools import Decoding, Prefilling, joined, until

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]
TINY = ROOT / "tests" / "fixtures" / "tiny-austen"
START_S = 90.0


class Registry(registry_pb2_grpc.RegistryServicer):
    """Hears workers announce themselves."""

    def __init__(self) -> None:
        self.infos: dict[str, WorkerInfo] = {}
        self.loads: dict[str, WorkerLoad] = {}
        self.left: set[str] = set()
        self._news = asyncio.Condition()

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: object) -> registry_pb2.AnnounceResponse:
        info = wire_handoff.worker_info_from_pb(request.info)
        async with self._news:
            self.infos[info.ref.worker_id] = info
            self.loads[info.ref.worker_id] = wire_handoff.worker_load_from_pb(request.load)
            self._news.notify_all()
        return registry_pb2.AnnounceResponse(ttl_s=5)

    async def Leave(self, request: registry_pb2.LeaveRequest, context: object) -> registry_pb2.LeaveResponse:
        async with self._news:
            self.left.add(request.ref.worker_id)
            self._news.notify_all()
        return registry_pb2.LeaveResponse()

    async def life(self, worker_id: str, after_epoch: int = 0) -> WorkerInfo:
        async with asyncio.timeout(START_S), self._news:
            await self._news.wait_for(lambda: worker_id in self.infos and self.infos[worker_id].ref.epoch > after_epoch)
        return self.infos[worker_id]

    async def free(self, worker_id: str) -> None:
        """Until the worker says that nothing is in its pool."""
        self.loads.pop(worker_id, None)
        async with asyncio.timeout(30), self._news:
            await self._news.wait_for(
                lambda: (
                    worker_id in self.loads
                    and self.loads[worker_id]
                    == replace(self.loads[worker_id], num_running=0, num_waiting=0, kv_usage=0.0)
                )
            )


class Reached:
    """What `Decoding` and `Prefilling` want to know of a worker."""

    def __init__(self, info: WorkerInfo) -> None:
        self.info = info
        self.ref = info.ref
        self.channel = open_channel(info.address)


class Cluster:
    """The processes of one test. All of them are gone at its end."""

    def __init__(self, router: str, registry: Registry, connector: str) -> None:
        self.registry = registry
        self._router = router
        self._connector = connector
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.reached: list[Reached] = []

    async def start(self, kind: str, worker_id: str, *flags: str) -> Reached:
        known = self.registry.infos.get(worker_id)
        argv = [sys.executable, "-P", "-m", "cli", kind, "--model", str(TINY), "--worker-id", worker_id]
        argv += ["--router", self._router, "--connector", self._connector, "--threads", "1", "--kv-memory", "8MiB"]
        self.processes[worker_id] = await asyncio.create_subprocess_exec(*argv, *flags, "--log-level", "info", cwd="/")
        info = await self.registry.life(worker_id, 0 if known is None else known.ref.epoch)
        self.reached.append(Reached(info))
        return self.reached[-1]

    async def end(self, worker_id: str, number: signal.Signals) -> int:
        process = self.processes.pop(worker_id)
        process.send_signal(number)
        async with asyncio.timeout(30):
            return await process.wait()


@asynccontextmanager
async def cluster(connector: str) -> AsyncIterator[Cluster]:
    registry = Registry()
    server = RpcServer(ServerConfig(), ())
    registry_pb2_grpc.add_RegistryServicer_to_server(registry, server.grpc_server)
    made = Cluster(f"127.0.0.1:{await server.start()}", registry, connector)
    try:
        yield made
    finally:
        for reached in made.reached:
            await reached.channel.close()
        for process in made.processes.values():
            process.kill()
            await process.wait()
        await server.stop(0)


def target(decode: Reached, handoff_id: str) -> prefill_pb2.HandoffTarget:
    ref = wire_handoff.worker_ref_to_pb(decode.info.ref)
    return prefill_pb2.HandoffTarget(handoff_id=handoff_id, decode=ref, address=decode.info.address)


def asked(index: int, num_output: int = 12) -> GenerationRequest:
    prompt = tuple((index * 37 + i * 11) % 200 + 5 for i in range(10 + index * 9))
    sampling = SamplingParams(temperature=index % 2 * 0.8, seed=index, max_tokens=num_output, ignore_eos=True)
    return GenerationRequest(f"r-{index}", prompt, sampling)


async def through_both(prefill: Reached, decode: Reached, decoding: Decoding, request: GenerationRequest) -> list[int]:
    handoff_id = f"h-{request.request_id}"
    prefilling = Prefilling(prefill)
    await decoding.attach(handoff_id)
    await prefilling.run(request, target(decode, handoff_id))
    first = await prefilling.first()
    event = await prefilling.event()
    assert event.WhichOneof("event") == "handed_off", event
    return list(joined([first, *await decoding.whole(handoff_id)]).token_ids)


@pytest.mark.parametrize("connector", ["shm", "tcp"])
async def test_two_processes_give_the_tokens_of_one(connector: str) -> None:
    async with cluster(connector) as made:
        prefill, decode = await asyncio.gather(made.start("prefill", "p"), made.start("decode", "d"))
        assert prefill.info.layout == decode.info.layout
        decoding = Decoding(decode)
        requests = [asked(index) for index in range(8)]
        apart = await asyncio.gather(*(through_both(prefill, decode, decoding, request) for request in requests))
        for request, token_ids in zip(requests, apart, strict=True):
            await decoding.generate(replace(request, request_id=f"alone-{request.request_id}"))
            alone = joined(await decoding.whole(f"alone-{request.request_id}"))
            assert list(alone.token_ids) == token_ids
        await decoding.close()
        await made.registry.free("d")
        await made.registry.free("p")
        assert await made.end("p", signal.SIGTERM) == 0
        assert await made.end("d", signal.SIGINT) == 0
        assert made.registry.left == {"p", "d"}


@pytest.mark.parametrize("connector", ["shm", "tcp"])
async def test_two_processes_narrow_what_they_exchange_alike_or_not_at_all(connector: str) -> None:
    async with cluster(connector) as made:
        prefill, decode, exact = await asyncio.gather(
            made.start("prefill", "p", "--kv-transfer-dtype", "int8"),
            made.start("decode", "d", "--kv-transfer-dtype", "int8"),
            made.start("decode", "e"),
        )
        assert prefill.info.layout == decode.info.layout == exact.info.layout.sent_as("int8")
        decoding = Decoding(decode)
        requests = [asked(index) for index in range(8)]
        first = await asyncio.gather(*(through_both(prefill, decode, decoding, request) for request in requests))
        assert [len(tokens) for tokens in first] == [12] * 8
        again = [replace(request, request_id=f"again-{request.request_id}") for request in requests]
        assert [await through_both(prefill, decode, decoding, request) for request in again] == first
        prefilling = Prefilling(prefill)
        await prefilling.run(asked(1), target(exact, "h-refused"))
        await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        assert "kv layout differs in transfer_dtype: ours 'auto', theirs 'int8'" in failed.error.message
        prefilling.call.cancel()
        await decoding.close()
        for worker_id in ("p", "d", "e"):
            await made.registry.free(worker_id)
            assert await made.end(worker_id, signal.SIGTERM) == 0


async def test_a_killed_prefill_worker_does_not_take_a_decode_worker_with_it() -> None:
    async with cluster("shm") as made:
        prefill, decode = await asyncio.gather(made.start("prefill", "p"), made.start("decode", "d"))
        decoding = Decoding(decode)
        runs = [Prefilling(prefill) for _ in range(6)]
        for index, prefilling in enumerate(runs):
            await decoding.attach(f"h-{index}")
            await prefilling.run(asked(index + 10), target(decode, f"h-{index}"))
        await runs[0].first()
        assert await made.end("p", signal.SIGKILL) == -signal.SIGKILL
        again = await made.start("prefill", "p")
        assert again.info.ref.epoch > prefill.info.ref.epoch
        token_ids = await through_both(again, decode, decoding, asked(3))
        await decoding.generate(replace(asked(3), request_id="alone"))
        assert list(joined(await decoding.whole("alone")).token_ids) == token_ids
        await decoding.close()
        await made.registry.free("d")


async def test_a_worker_that_is_asked_to_stop_finishes_its_answers() -> None:
    async with cluster("shm") as made:
        decode = await made.start("decode", "d")
        decoding = Decoding(decode)
        request = asked(1, num_output=100)
        await decoding.generate(request)
        await decoding.some(request.request_id, 1)
        assert await made.end("d", signal.SIGTERM) == 0
        assert len(joined(await decoding.whole(request.request_id)).token_ids) == 100
        assert decoding.error is None


async def test_a_worker_that_cannot_start_says_so_in_one_line() -> None:
    async with cluster("shm") as made:
        decode = await made.start("decode", "d")
        port = decode.info.address.rpartition(":")[2]
        argv = [sys.executable, "-P", "-m", "cli", "prefill", "--model", str(TINY), "--router", "127.0.0.1:1"]
        argv += ["--port", port, "--log-level", "error"]
        process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE, cwd="/")
        _, complaint = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert complaint.decode().splitlines() == [f"error: cannot listen on 127.0.0.1:{port}: Address already in use"]


async def test_a_signal_while_the_model_loads_ends_it_at_once_and_well() -> None:
    argv = [
        sys.executable,
        "-P",
        "-m",
        "cli",
        "decode",
        "--model",
        str(TINY),
        "--log-level",
        "info",
        "--router",
        "127.0.0.1:1",
    ]
    with memory_turn():  # it waits for its turn with its model in its hands
        process = await asyncio.create_subprocess_exec(*argv, stderr=asyncio.subprocess.PIPE, cwd="/")
        await until(lambda: any(c.status == "LISTEN" for c in psutil.Process(process.pid).net_connections()))
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(30):
            _, said = await process.communicate()
    assert (process.returncode, b"stopped while loading" in said) == (0, True)
