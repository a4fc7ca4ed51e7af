"""The server shell over a real loopback socket: errors, health, reflection, ports, and that streams are always closed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import grpc
import pytest
from google.protobuf import wrappers_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from contracts.errors import ConfigError, InternalError, InvalidRequest, WorkerLost
from contracts.pb.diptych.v1 import prefill_pb2, prefill_pb2_grpc, registry_pb2, registry_pb2_grpc
from rpc.calls import ErrorInterceptor, Silent, StallWatch
from rpc.channel import open_channel, wait_connected
from rpc.errors import from_rpc_error
from rpc.server import RpcServer, ServerConfig, has_port, join_address

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

    async def Session(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: object
    ) -> AsyncIterator[prefill_pb2.PrefillBatch]:
        try:
            for index in range(self.first):
                event = prefill_pb2.PrefillBatch()
                event.events.add().handed_off.handoff_id = str(index) + "x" * 4000
                yield event
            if self.error is not None:
                raise self.error
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.closed.set()


class Echo(prefill_pb2_grpc.PrefillServicer):
    """Reads all that it is sent, then ends."""

    async def Session(
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillCommand], context: object
    ) -> AsyncIterator[prefill_pb2.PrefillBatch]:
        async for _ in request_iterator:
            yield prefill_pb2.PrefillBatch()


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
    record = next(r for r in caplog.records if r.name == "rpc.calls")
    assert record.exc_info is not None
    assert record.exc_info[0] is KeyError


@pytest.mark.parametrize("error", [InvalidRequest("prompt", 0, "must have tokens"), RuntimeError("bug")])
async def test_an_error_in_a_stream_follows_what_was_sent(error: Exception) -> None:
    prefill = Prefill(first=2, error=error)
    async with serving(prefill=prefill) as (_, channel):
        call = prefill_pb2_grpc.PrefillStub(channel).Session()
        got = []
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for event in call:
                got.append(event)
        assert len(got) == 2
        assert isinstance(from_rpc_error(caught.value, "peer"), (InvalidRequest, InternalError))
        assert prefill.closed.is_set()


@pytest.mark.parametrize("method", ["/diptych.v1.Registry/Announce", "/diptych.v1.Prefill/Session"])
async def test_bytes_that_are_no_message_are_the_callers_fault(method: str, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(prefill=Echo()) as (_, channel):
        streams = method.endswith("Session")
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
        call = prefill_pb2_grpc.PrefillStub(channel).Session()
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
    watch, timers = StallWatch(60.0), []
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
        call = prefill_pb2_grpc.PrefillStub(channel).Session()
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


ANNOUNCE = "/diptych.v1.Registry/Announce"
RUN = "/diptych.v1.Prefill/Session"
REFLECT = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
LIST = reflection_pb2.ServerReflectionRequest(list_services="")


async def ended(call: grpc.aio.Call) -> tuple[grpc.StatusCode, str]:
    async with asyncio.timeout(10):
        return await call.code(), str(await call.details())


@pytest.mark.parametrize("method", [ANNOUNCE, "/grpc.health.v1.Health/Watch", RUN, REFLECT])
async def test_a_call_whose_message_does_not_come_is_ended(method: str) -> None:
    """Its caller stays, and answers pings: nothing but time tells."""
    async with serving(prefill=Echo(), config=ServerConfig(stall_s=0.2)) as (_, channel):
        code, details = await ended(channel.stream_stream(method)())
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "no message came within 0.2 s" in details


async def test_our_streams_may_pause_after_their_first_message_and_strangers_may_not() -> None:
    async with serving(prefill=Echo(), config=ServerConfig(stall_s=0.1)) as (_, channel):
        ours, theirs = channel.stream_stream(RUN)(), channel.stream_stream(REFLECT)()
        await ours.write(b"")
        await theirs.write(LIST.SerializeToString())
        await theirs.read()
        assert (await ended(theirs))[0] is grpc.StatusCode.DEADLINE_EXCEEDED
        assert not ours.done()
        ours.cancel()


@pytest.mark.parametrize("method", [ANNOUNCE, "/grpc.health.v1.Health/Watch"])
async def test_a_call_that_ends_without_its_message_is_told_what_is_missing(method: str) -> None:
    async with serving() as (_, channel):
        call = channel.stream_stream(method)()
        await call.done_writing()
        code, details = await ended(call)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert "message" in details


async def test_of_a_crowd_that_says_nothing_the_oldest_goes_early(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.calls._CROWD", 3)
    monkeypatch.setattr("rpc.calls._CROWD_PATIENCE", 0.0)
    silent, never, order = Silent(60.0), asyncio.Event(), list[int]()

    async def call(number: int) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await silent.heard(never.wait(), limit)
        order.append(number)

    calls = []
    for number in range(5):
        calls.append(asyncio.ensure_future(call(number)))
        await asyncio.sleep(0)
    await asyncio.wait(calls[:2], timeout=10)
    assert order == [0, 1]
    assert len(silent) == 3
    never.set()
    await asyncio.gather(*calls)
    assert len(silent) == 0


async def test_one_timer_ends_whoever_is_silent_each_in_its_time() -> None:
    silent, since = Silent(0.05), asyncio.get_running_loop().time

    async def call() -> float:
        began = since()
        with suppress(TimeoutError):
            async with asyncio.timeout(None) as limit:
                await silent.heard(asyncio.Event().wait(), limit)
        return since() - began

    calls = []
    for _ in range(3):
        calls.append(asyncio.ensure_future(call()))
        await asyncio.sleep(0.01)
    async with asyncio.timeout(10):
        assert min(await asyncio.gather(*calls)) >= 0.05


async def test_who_watches_health_and_does_not_read_holds_nobody_up() -> None:
    """gRPC's own servicer kept its lock while it wrote to him: the server could say nothing more, nor stop."""
    async with serving(config=ServerConfig(stall_s=60.0)) as (server, channel):
        watch = server._health.Watch(health_pb2.HealthCheckRequest(), None)  # type: ignore[arg-type]
        await anext(watch)  # and never again
        stub = health_pb2_grpc.HealthStub(channel)
        heard = stub.Watch(health_pb2.HealthCheckRequest(service=NAMES[0]))
        for serving_now in (False, True, False):
            await server.set_serving(serving_now)
            assert ((await heard.read()).status == health_pb2.HealthCheckResponse.SERVING) is serving_now
        await watch.aclose()
        unknown = stub.Watch(health_pb2.HealthCheckRequest(service="who"))
        assert (await unknown.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        with pytest.raises(grpc.aio.AioRpcError, match="NOT_FOUND"):
            await stub.Check(health_pb2.HealthCheckRequest(service="who"))
        heard.cancel()
        unknown.cancel()


async def test_watches_of_health_are_bounded_and_those_that_end_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rpc.health.MAX_WATCHES", 2)
    async with serving() as (_, channel):
        stub = health_pb2_grpc.HealthStub(channel)
        watches = [stub.Watch(health_pb2.HealthCheckRequest()) for _ in range(2)]
        for watch in watches:
            await watch.read()
        refused = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await ended(refused))[0] is grpc.StatusCode.RESOURCE_EXHAUSTED
        watches[0].cancel()
        async with asyncio.timeout(10):
            while (await stub.Watch(health_pb2.HealthCheckRequest()).read()) is grpc.aio.EOF:
                await asyncio.sleep(0.01)
        watches[1].cancel()
