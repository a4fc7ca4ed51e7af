"""Peers that do not answer at all: an address where nobody is any more, and connections that go silent without a word."""

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import replace

import grpc
import pytest

from contracts.clock import MonotonicClock
from contracts.errors import WorkerLost
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc
from contracts.prefill import Target
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.ticket import RenewRequest
from contracts.worker import WorkerInfo, WorkerKind, WorkerLoad, WorkerRef
from prefill_service.peer import GrpcPeer
from router.config import BreakerConfig
from router.serving.inbox import DecodeLost, Inbox, PrefillEnded
from router.serving.legs import DecodeSession, PrefillLine
from rpc.announce import AnnounceConfig, Announcer, GrpcRegistryClient
from rpc.channel import ChannelConfig, open_channel
from rpc.errors import from_rpc_error
from rpc.server import RpcServer, ServerConfig
from tests.integration.router_harness import MODEL, router_config, running_router
from tests.integration.scripted_workers import LAYOUT

CONNECT_S = 0.4
BASE = {"model": MODEL, "prompt": [5, 6, 7], "max_tokens": 4, "temperature": 0, "ignore_eos": True}


@contextlib.contextmanager
def black_hole() -> Iterator[str]:
    """An address whose packets go nowhere, as a dead container's: the queue of a socket that nobody accepts from is full."""
    with contextlib.ExitStack() as held:
        listener = held.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(16):
            filler = held.enter_context(socket.socket())
            filler.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                filler.connect(listener.getsockname())
        time.sleep(0.02)
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.asynccontextmanager
async def ghost(running, kind, address):
    """A worker that announces itself, and whose address is another's who died."""
    ref = WorkerRef("a-ghost", 1)  # the first that a policy takes among equals
    info = WorkerInfo(ref, kind, address, MODEL, LAYOUT, ("local",), 1024, 256)
    announcer = Announcer(
        GrpcRegistryClient(running.target), info, WorkerLoad, MonotonicClock(), AnnounceConfig(interval_s=0.05)
    )
    assert await announcer.announce_once()
    task = asyncio.ensure_future(announcer.run())
    try:
        yield ref
    finally:
        task.cancel()
        await asyncio.wait((task,))
        await announcer.leave()


async def asked(running, route):
    began = time.monotonic()
    response = await running.http.post("/v1/completions", json={**BASE, "diptych": {"route": route}})
    assert response.status_code == 200, response.text
    return time.monotonic() - began


@pytest.mark.parametrize(
    ("kind", "route"), [("prefill", "disaggregated"), ("decode", "disaggregated"), ("decode", "colocated")]
)
async def test_an_address_where_nobody_is_costs_a_connect_timeout_and_soon_nothing(tmp_path, kind, route):
    config = router_config(
        tmp_path,
        channel=ChannelConfig(connect_timeout_s=CONNECT_S),
        breaker=BreakerConfig(failures_in_a_row=2, open_s=60.0, max_open_s=60.0),
    )
    async with running_router(config) as running:
        with black_hole() as address:
            await running.cluster.pools(2, 2)
            async with ghost(running, WorkerKind(kind), address) as ref:
                took = [await asked(running, route)]
                assert CONNECT_S <= took[0] < CONNECT_S + 5.0, "another worker takes it when the connect has timed out"
                while await running.metric("diptych_worker_breaker_state", worker_id=ref.worker_id) != 2:
                    took.append(await asked(running, route))
                    await asyncio.sleep(0.05)  # until the ghost announces itself again
                assert all(took_s < CONNECT_S + 5.0 for took_s in took)
                before = await running.metric("diptych_failed_attempts_total")
                for _ in range(8):
                    await asked(running, route)
                assert before > 0
                assert await running.metric("diptych_failed_attempts_total") == before, "nobody is sent there any more"
                health = (await running.http.get("/health")).json()
                (said,) = health["breakers"]
                assert (said["worker"], said["state"]) == ("a-ghost", "open")
                assert "cannot connect within" in said["reason"]
                assert health["status"] == "ok"
        assert await running.metric("diptych_worker_breaker_openings_total", pool=kind, cause="failures") == 1


async def test_a_worker_with_an_open_breaker_still_serves_where_there_is_no_other_and_is_forgiven(tmp_path):
    config = router_config(tmp_path, breaker=BreakerConfig(failures_in_a_row=1, open_s=60.0, max_open_s=60.0))
    async with running_router(config) as running:
        await running.cluster.pools(0, 1)
        (worker,) = running.cluster.workers
        worker.faults.die_after_tokens = 0
        assert await asked(running, "colocated") < 5.0
        assert (await running.http.get("/health")).json()["breakers"] == []


# Keep-alives

ALIVE = {"keepalive_s": 0.5, "keepalive_timeout_s": 0.5}
BOUND_S = sum(ALIVE.values())


class Wire:
    """Passes bytes on between one client and a server until it is told to drop them all, both ways, and never closes."""

    def __init__(self, port):
        self._port, self._writers, self.dead = port, [], False

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        self._tasks = []
        return self

    async def _accept(self, reader, writer):
        there_reader, there_writer = await asyncio.open_connection("127.0.0.1", self._port)
        self._writers += [writer, there_writer]
        self._tasks += [
            asyncio.ensure_future(self._pump(reader, there_writer)),
            asyncio.ensure_future(self._pump(there_reader, writer)),
        ]

    async def _pump(self, reader, writer):
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if not self.dead:
                    writer.write(data)

    async def __aexit__(self, *_):
        for writer in self._writers:
            writer.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.wait(self._tasks)
        self._server.close()


class Waiting(decode_pb2_grpc.DecodeServicer):
    """A session that says nothing; knows for how long the server believed in its client."""

    def __init__(self):
        self.open, self.over = asyncio.Event(), asyncio.Event()

    async def Session(self, commands, context):
        self.open.set()
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.over.set()


async def test_a_connection_that_goes_silent_is_found_from_both_ends_within_the_bound():
    server = RpcServer(replace(ServerConfig(), **ALIVE), ())
    servicer = Waiting()
    decode_pb2_grpc.add_DecodeServicer_to_server(servicer, server.grpc_server)
    async with Wire(await server.start()) as wire:
        channel = open_channel(wire.address, ChannelConfig(**ALIVE))
        call = decode_pb2_grpc.DecodeStub(channel).Session()
        await call.write(decode_pb2.DecodeCommand())
        await servicer.open.wait()
        await asyncio.sleep(2 * BOUND_S)
        assert not servicer.over.is_set(), "silence of the application is no silence of the connection"
        wire.dead, began = True, time.monotonic()
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value, "it"), WorkerLost)
        client_s = time.monotonic() - began
        async with asyncio.timeout(5):
            await servicer.over.wait()
        server_s = time.monotonic() - began
        assert client_s < BOUND_S + 0.5
        assert server_s < BOUND_S + 0.5
        await channel.close()
    await server.stop(0)


def test_the_bound_is_the_same_on_every_hop_and_documented():
    """Router to both pools, prefill to decode and workers to routers open their channels in one way; servers do likewise."""
    options = dict(ChannelConfig().options)
    served = dict(ServerConfig().options)
    for name in ("grpc.keepalive_time_ms", "grpc.keepalive_timeout_ms", "grpc.keepalive_permit_without_calls"):
        assert options[name] == served[name]
    assert options["grpc.http2.ping_timeout_ms"] == served["grpc.http2.ping_timeout_ms"] == 5_000
    assert options["grpc.keepalive_time_ms"] + options["grpc.keepalive_timeout_ms"] == 15_000
    assert options["grpc.http2.max_pings_without_data"] == 0
    assert served["grpc.http2.min_ping_interval_without_data_ms"] < options["grpc.keepalive_time_ms"]


class Silent(grpc.GenericRpcHandler):
    """Takes every call of ours, and never answers."""

    def __init__(self):
        self.num_calls, self.num_over = 0, 0

    def service(self, details):
        if not details.method.startswith("/diptych.v1."):
            return None

        async def stream(requests, context):
            self.num_calls += 1
            try:
                await asyncio.Event().wait()
                yield b""
            finally:
                self.num_over += 1

        return grpc.stream_stream_rpc_method_handler(stream)


def silent_opener(address, config):
    del config
    return open_channel(address, ChannelConfig(**ALIVE))


async def hears(inbox, kind):
    while not isinstance(event := await inbox.get(), kind):
        pass
    return event.error


async def test_every_hop_finds_out_that_its_peer_went_silent():
    """Router to prefill and to decode, prefill to decode, worker to router: each with its own code, all packets dropped."""
    server, silent = RpcServer(replace(ServerConfig(), **ALIVE), ()), Silent()
    server.grpc_server.add_generic_rpc_handlers((silent,))
    prefill, decode = WorkerRef("p", 1), WorkerRef("d", 1)
    request = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=2))
    async with Wire(await server.start()) as wire:
        channel, to_prefill, to_decode = silent_opener(wire.address, None), Inbox(), Inbox()
        infos = [
            WorkerInfo(ref, kind, wire.address, MODEL, LAYOUT, ("local",), 1024, 256)
            for ref, kind in ((prefill, WorkerKind.PREFILL), (decode, WorkerKind.DECODE))
        ]
        leg, suspects = PrefillLine(infos[0], channel, 3.0).leg(to_prefill), []
        session = DecodeSession(infos[1], channel, 3.0, suspects.append)
        peer = GrpcPeer(decode, wire.address, silent_opener)
        registry = GrpcRegistryClient(wire.address, timeout_s=60.0, opener=silent_opener)
        leg.start(request, Target("h", decode, wire.address))
        session.attach("h", 60.0, to_decode)
        hops = {
            "router to prefill": asyncio.ensure_future(hears(to_prefill, PrefillEnded)),
            "router to decode": asyncio.ensure_future(hears(to_decode, DecodeLost)),
            "prefill to decode": asyncio.ensure_future(peer.renew(RenewRequest(prefill, decode, ("h",)))),
            "worker to router": asyncio.ensure_future(registry.announce(infos[0], WorkerLoad())),
        }
        async with asyncio.timeout(10):
            while silent.num_calls < len(hops):
                await asyncio.sleep(0.01)
        wire.dead = True
        done, late = await asyncio.wait(hops.values(), timeout=BOUND_S + 1.0)
        assert not late, [name for name, hop in hops.items() if hop in late]
        assert len(done) == len(hops)
        for name, hop in hops.items():
            error = hop.exception() or hop.result()
            assert isinstance(error, WorkerLost), (name, error)
        assert suspects == [infos[1]]
        async with asyncio.timeout(5):  # and whoever was called lets go, too
            while silent.num_over < len(hops):
                await asyncio.sleep(0.01)
        session.close("over")
        await registry.close()
        await peer.close()
        await channel.close()
    await server.stop(0)
