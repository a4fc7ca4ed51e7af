"""The server shell over a real loopback socket: errors, health, reflection, ports, and that streams are always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import grpc
import pytest
from google.protobuf import wrappers_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from contracts.errors import ConfigError, InternalError, InvalidRequest, WorkerLost
from contracts.pb.diptych.v1 import prefill_pb2, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from rpc.channel import open_channel, wait_connected
from rpc.errors import from_rpc_error
from rpc.server import ErrorInterceptor, RpcServer, ServerConfig, _StallWatch, has_port, join_address

NAMES = ("diptych.v1.Registry", "diptych.v1.Prefill")


class Registry(registry_pb2_grpc.RegistryServicer):
    def __init__(self, error: Exception | None = None) -> None:
        self.error = error

    async def Announce(self, request: registry_pb2.AnnounceRequest, context: object) -> registry_pb2.AnnounceResponse:
        if self.error is not None:
            raise self.error
        return registry_pb2.AnnounceResponse(ttl_s=7)


class Prefill(prefill_pb2_grpc.PrefillServicer):
    """Sends `first` messages, then waits for ever, and notes when it was closed."""

    def __init__(self, first: int = 1, error: Exception | None = None) -> None:
        self.first = first
        self.error = error
        self.closed = asyncio.Event()

    async def Run(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: object
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        try:
            for index in range(self.first):
                event = prefill_pb2.PrefillEvent()
                event.handed_off.handoff_id = str(index) + "x" * 4000
                yield event
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.closed.set()


class Echo(prefill_pb2_grpc.PrefillServicer):
    """Reads all that it is sent, then ends."""

    async def Run(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: object
    ) -> AsyncIterator[prefill_pb2.PrefillEvent]:
        async for _ in request_iterator:
            yield prefill_pb2.PrefillEvent()


@asynccontextmanager
async def serving(
    registry: Registry | None = None, prefill: Prefill | Echo | None = None, config: ServerConfig | None = None
) -> AsyncIterator[tuple[RpcServer, grpc.aio.Channel]]:
    server = RpcServer(config or ServerConfig(), NAMES)
    registry_pb2_grpc.add_RegistryServicer_to_server(registry or Registry(), server.grpc_server)
    prefill_pb2_grpc.add_PrefillServicer_to_server(prefill or Prefill(), server.grpc_server)
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        yield server, channel
    await server.stop(0)


async def announce_error(error: Exception) -> Exception:
    async with serving(Registry(error)) as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry_pb2_grpc.RegistryStub(channel).Announce(registry_pb2.AnnounceRequest())
        return from_rpc_error(caught.value, "peer")


async def test_an_error_of_ours_arrives_as_itself() -> None:
    back = await announce_error(InvalidRequest("load.state", 0, "must be said"))
    assert isinstance(back, InvalidRequest)
    assert back.field == "load.state"


async def test_a_bug_is_internal_and_logged_with_its_traceback(caplog: pytest.LogCaptureFixture) -> None:
    back = await announce_error(KeyError("secret"))
    assert isinstance(back, InternalError)
    assert "secret" not in back.message
    record = next(r for r in caplog.records if r.name == "rpc.server")
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


@pytest.mark.parametrize("error", [InvalidRequest("prompt", 0, "must have tokens"), RuntimeError("bug")])
async def test_an_error_in_a_stream_follows_what_was_sent(error: Exception) -> None:
    prefill = Prefill(first=2, error=error)
    async with serving(prefill=prefill) as (_, channel):
        call = prefill_pb2_grpc.PrefillStub(channel).Run()
        got = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                got.append(event)
        assert len(got) == 2
        assert isinstance(from_rpc_error(caught.value, "peer"), (InvalidRequest, InternalError))
        assert prefill.closed.is_set()


@pytest.mark.parametrize("method", ["/diptych.v1.Registry/Announce", "/diptych.v1.Prefill/Run"])
async def test_bytes_that_are_no_message_are_the_callers_fault(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(prefill=Echo()) as (_, channel):
        streams = method.endswith("Run")
        call = channel.stream_unary(method) if streams else channel.unary_unary(method)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call(iter([b"\xff\xff"]) if streams else b"\xff\xff")
    error = from_rpc_error(caught.value, "peer")
    assert isinstance(error, InvalidRequest)
    assert error.field == "message"
    assert "diptych.v1." in error.limit
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_long_complaint_is_cut_to_what_trailers_hold() -> None:
    back = await announce_error(WorkerLost("é" * 1_000_000))
    assert isinstance(back, WorkerLost)
    assert back.message == "é" * 1000


async def test_a_caller_that_does_not_read_loses_the_call_and_is_told_so_when_it_reads() -> None:
    prefill = Prefill(first=10_000)
    async with serving(prefill=prefill, config=ServerConfig(stall_s=0.3)) as (_, channel):
        call = prefill_pb2_grpc.PrefillStub(channel).Run()
        await asyncio.wait_for(prefill.closed.wait(), 10.0)
        got = 0
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _event in call:
                got += 1
        assert 0 < got < 10_000
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        assert "no message was taken for 0.3 s" in str(caught.value.details())


async def test_messages_of_a_stream_share_one_timer_and_leave_none() -> None:
    """A timer for each cost more than all the rest that is done for a message."""
    watch, timers = _StallWatch(60.0), []
    async with watch.limit:
        for _ in range(100):
            watch.writing()
            timers.append(watch._timer)
            watch.written()
    assert timers[0] is not None
    assert all(timer is timers[0] for timer in timers)
    watch.close()
    assert timers[0].cancelled()


async def closes_when(end: Callable[[grpc.aio.StreamStreamCall], object], first: int) -> None:
    prefill = Prefill(first=first)
    async with serving(prefill=prefill) as (_, channel):
        call = prefill_pb2_grpc.PrefillStub(channel).Run()
        await call.read()
        end(call)
        await asyncio.wait_for(prefill.closed.wait(), 10)


async def test_a_method_is_made_ready_once_and_a_refusal_that_takes_its_place_is_another() -> None:
    """An interceptor behind this one may answer instead of the service, from one call to the next."""
    servicer = Registry()
    served, refused = (
        grpc.unary_unary_rpc_method_handler(behaviour) for behaviour in (servicer.Announce, servicer.Leave)
    )
    interceptor, ready = ErrorInterceptor(1.0), []
    for handler in (served, served, refused, served):

        async def continuation(details: object, handler: object = handler) -> object:
            return handler

        ready.append(await interceptor.intercept_service(continuation, _Details("/diptych.v1.Registry/Announce")))
    assert ready[0] is ready[1] is ready[3]
    assert ready[2] is not ready[0]


class _Details(grpc.HandlerCallDetails):
    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


async def test_a_client_that_leaves_while_the_stream_waits_closes_it() -> None:
    await closes_when(lambda call: call.cancel(), first=1)


async def test_a_client_that_leaves_while_a_message_is_being_sent_closes_it() -> None:
    await closes_when(lambda call: call.cancel(), first=100_000)


async def test_health_of_every_service_and_of_all() -> None:
    async with serving() as (server, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        for serving_now in (False, True, False):
            await server.set_serving(serving_now)
            for name in ("", *NAMES):
                answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
                assert (answer.status == health_pb2.HealthCheckResponse.SERVING) is serving_now


async def test_reflection_lists_the_services() -> None:
    async with serving() as (_, channel):
        call = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        answer = await call.read()
        await call.done_writing()
        names = {service.name for service in answer.list_services_response.service}
        assert names >= {*NAMES, "grpc.health.v1.Health"}


async def test_a_busy_port_is_a_config_error_that_names_it() -> None:
    async with serving() as (server, _):
        second = RpcServer(ServerConfig(port=server.port), ())
        with pytest.raises(ConfigError, match=f"127.0.0.1:{server.port}.*in use"):
            await second.start()
        await second.stop(0)


async def test_a_host_that_is_not_ours_is_a_config_error() -> None:
    server = RpcServer(ServerConfig(host="192.0.2.1"), ())
    with pytest.raises(ConfigError, match=r"192\.0\.2\.1:0"):
        await server.start()
    await server.stop(0)


async def test_nobody_there_is_worker_lost() -> None:
    async with serving() as (server, _):
        port = server.port
    async with open_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(WorkerLost, match="cannot connect within"):
            await wait_connected(channel, f"127.0.0.1:{port}", 0.05)


async def test_a_message_over_the_limit_is_refused_and_the_rest_goes_on() -> None:
    server = RpcServer(ServerConfig(max_message_bytes=1000), NAMES)
    registry_pb2_grpc.add_RegistryServicer_to_server(Registry(), server.grpc_server)
    port = await server.start()
    async with open_channel(f"127.0.0.1:{port}") as channel:
        big = registry_pb2.AnnounceRequest(info=registry_pb2.WorkerInfo(model_name="x" * 2000))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await registry_pb2_grpc.RegistryStub(channel).Announce(big)
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await registry_pb2_grpc.RegistryStub(channel).Announce(registry_pb2.AnnounceRequest())).ttl_s == 7
    await server.stop(0)


async def test_an_unknown_method_is_unimplemented() -> None:
    async with serving() as (_, channel):
        method = channel.unary_unary(
            "/diptych.v1.Registry/Nope", wrappers_pb2.StringValue.SerializeToString, wrappers_pb2.StringValue.FromString
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await method(wrappers_pb2.StringValue())
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize(
    ("config", "toward", "expected"),
    [
        (ServerConfig(advertise="a.example:9"), "", "a.example:9"),
        (ServerConfig(advertise="a.example"), "", "a.example:{port}"),
        (ServerConfig(host="127.0.0.1"), "", "127.0.0.1:{port}"),
        (ServerConfig(host="0.0.0.0"), "127.0.0.1:1", "127.0.0.1:{port}"),
    ],
)
async def test_the_advertised_address(config: ServerConfig, toward: str, expected: str) -> None:
    server = RpcServer(config, ())
    port = await server.start()
    assert server.advertised_address(toward) == expected.format(port=port)
    await server.stop(0)


def test_addresses() -> None:
    assert join_address("::1", 5) == "[::1]:5"
    assert join_address("[::1]", 5) == "[::1]:5"
    assert join_address("", 5) == "0.0.0.0:5"
    assert [has_port(a) for a in ("h:1", "h", "::1", "[::1]:1", ":1")] == [True, False, False, True, False]


async def test_a_method_that_a_service_does_not_have_is_no_fault_of_ours(caplog) -> None:
    """gRPC's health service comes with one, which any stranger may call."""
    async with serving() as (_, channel):
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest())
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED
    assert "call failed" not in caplog.text


class SlowHealth:
    """A health table whose entries take turns to write, as the real one's may; one kind of them many."""

    def __init__(self, slow: int) -> None:
        self.says: dict[str, int] = {}
        self._slow = slow

    async def set(self, name: str, status: int) -> None:
        for _ in range(9 if status == self._slow else 1):
            await asyncio.sleep(0)
        self.says[name] = status


@pytest.mark.parametrize("last", [True, False])
async def test_two_who_say_different_things_at_once_leave_no_mixture(last: bool) -> None:
    server = RpcServer(ServerConfig(), ("a", "b", "c"))
    health = server._health = SlowHealth(slow=2 if last else 1)  # type: ignore[assignment]
    first = asyncio.ensure_future(server.set_serving(not last))
    for _ in range(3):
        await asyncio.sleep(0)
    await asyncio.gather(first, server.set_serving(last))
    assert set(health.says.values()) == {1 if last else 2}
    assert server.serving is last
    broken = asyncio.ensure_future(server.set_serving(not last))
    for _ in range(24):
        await asyncio.sleep(0)
    broken.cancel()
    await asyncio.wait((broken,))
    await server.set_serving(last)
    assert set(health.says.values()) == {1 if last else 2}, "after one that was cancelled half way"
