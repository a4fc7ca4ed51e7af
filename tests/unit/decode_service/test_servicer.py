"""The session's door over a real connection: what cannot be read or obeyed ends the session, and says why."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest

from contracts.clock import MonotonicClock
from contracts.errors import InternalError, InvalidRequest, StaleEpoch
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc, types_pb2
from contracts.worker import WorkerRef
from decode_service.decode_servicer import DecodeServicer
from decode_service.desk import AnswerDesk
from decode_service.outputs import RouterSession
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeModel, FakeRunner
from kv_transfer.links import Side
from rpc.channel import open_channel
from rpc.errors import from_rpc_error
from rpc.server import RpcServer, ServerConfig

MODEL = FakeModel(max_model_len=256)
SESSION = "/diptych.v1.Decode/Session"


@asynccontextmanager
async def served(desk: AnswerDesk | None = None) -> AsyncIterator[grpc.aio.Channel]:
    clock = MonotonicClock()
    engine = Engine(FakeRunner(MODEL, 16), EngineConfig(), clock)
    worker = DecodeWorker(Side(WorkerRef("d", 1), MODEL.layout, [], clock), engine, AnswerConfig())
    worker.start()
    server = RpcServer(ServerConfig(), ())
    decode_pb2_grpc.add_DecodeServicer_to_server(DecodeServicer(desk or worker.desk), server.grpc_server)
    async with open_channel(f"127.0.0.1:{await server.start()}") as channel:
        yield channel
    await server.stop(0)
    await worker.stop()


D = types_pb2.WorkerRef(worker_id="d", epoch=1)


def attach(wait_s: float) -> bytes:
    command = decode_pb2.DecodeCommand(decode=D, attach=decode_pb2.Attach(handoff_id="h", wait_s=wait_s))
    return command.SerializeToString()


@pytest.mark.parametrize(
    ("command", "field"),
    [
        (b"", "worker_id"),
        (decode_pb2.DecodeCommand(decode=D).SerializeToString(), "command"),
        (b"\xff\xff", "message"),
        (attach(float("nan")), "attach.wait_s"),
        (decode_pb2.DecodeCommand(decode=D, attach=decode_pb2.Attach()).SerializeToString(), "attach.handoff_id"),
        (decode_pb2.DecodeCommand(decode=D, generate=decode_pb2.GenerateAlone()).SerializeToString(), "request_id"),
    ],
    ids=["empty", "no command", "garbage", "nan", "attach nothing", "generate nothing"],
)
async def test_a_command_that_makes_no_sense_ends_the_session_and_is_named(command: bytes, field: str) -> None:
    async with served() as channel:
        call = channel.stream_stream(SESSION)(iter([command]), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        error = from_rpc_error(caught.value, "worker")
        assert isinstance(error, InvalidRequest)
        assert error.field == field


@pytest.mark.parametrize("epoch", [0, 2])
@pytest.mark.parametrize(
    "command",
    [{"attach": decode_pb2.Attach(handoff_id="h")}, {"generate": decode_pb2.GenerateAlone()}, {"cancel": decode_pb2.Cancel()}],
    ids=lambda command: next(iter(command)),
)  # fmt: skip
async def test_a_command_for_another_life_is_not_obeyed(command: dict[str, object], epoch: int) -> None:
    other = decode_pb2.DecodeCommand(decode=types_pb2.WorkerRef(worker_id="d", epoch=epoch), **command)
    async with served() as channel:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await decode_pb2_grpc.DecodeStub(channel).Session(iter([other])).read()
        error = from_rpc_error(caught.value, "worker")
        assert isinstance(error, StaleEpoch)
        assert error.message == f"epoch of d: expected 1, got {epoch}"


async def test_a_request_that_makes_no_sense_fails_alone() -> None:
    bad = types_pb2.Request(request_id="bad", sampling=types_pb2.SamplingParams(), deadline_s=float("nan"))
    good = types_pb2.Request(
        request_id="good", prompt_token_ids=[1, 2], sampling=types_pb2.SamplingParams(temperature=0, max_tokens=2)
    )
    commands = [decode_pb2.DecodeCommand(decode=D, generate=decode_pb2.GenerateAlone(request=r)) for r in (bad, good)]
    async with served() as channel:
        deltas = [d async for b in decode_pb2_grpc.DecodeStub(channel).Session(iter(commands)) for d in b.deltas]
        assert [d.error.message for d in deltas if d.request_id == "bad"] == [
            "deadline_s: got nan, must be a number of seconds"
        ]
        assert sum(len(d.token_ids) for d in deltas if d.request_id == "good") == 2


class Faulty(AnswerDesk):
    """A desk with a bug."""

    def __init__(self) -> None:
        self.ref = WorkerRef("d", 1)

    def open_session(self) -> RouterSession:
        return RouterSession("s", 100)

    def attach(self, session: RouterSession, handoff_id: str, wait_s: float) -> None:
        raise RuntimeError("a bug")

    def close_session(self, session: RouterSession) -> None:
        session.end()


async def test_a_session_whose_commands_are_not_heard_any_more_does_not_stay_open() -> None:
    async with served(Faulty()) as channel:
        call = channel.stream_stream(SESSION)(iter([attach(1.0)]), timeout=20)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await call.read()
        assert isinstance(from_rpc_error(caught.value, "worker"), InternalError)
