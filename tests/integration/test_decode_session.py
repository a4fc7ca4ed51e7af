"""A router's session with a decode worker: many who leave at once are one word, and no word overtakes another."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from contracts import wire_handoff
from contracts.errors import DeadlineExceeded
from contracts.pb.diptych.v1 import decode_pb2, decode_pb2_grpc
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from engine.execution.fake import FakeModel
from router.serving.inbox import DecodeTokens, Inbox, TimeUp
from router.serving.legs import DecodeSession
from rpc.channel import open_channel
from rpc.server import RpcServer, ServerConfig
from tests.integration.pools import until

REF = WorkerRef("d", 1)


class Listener(decode_pb2_grpc.DecodeServicer):
    """Hears commands and says nothing, or tokens of everything that it is asked for, `num_tokens` each."""

    def __init__(self, num_tokens: int = 0) -> None:
        self.num_tokens = num_tokens
        self.heard: list[decode_pb2.DecodeCommand] = []

    async def Session(
        self, request_iterator: AsyncIterator[decode_pb2.DecodeCommand], context: object
    ) -> AsyncIterator[decode_pb2.DecodeBatch]:
        async for command in request_iterator:
            self.heard.append(command)
            for index in range(self.num_tokens if command.HasField("attach") else 0):
                batch = decode_pb2.DecodeBatch(decode=wire_handoff.worker_ref_to_pb(REF))
                batch.deltas.add(request_id=command.attach.handoff_id, first_index=index, token_ids=[index])
                yield batch
        yield decode_pb2.DecodeBatch(decode=wire_handoff.worker_ref_to_pb(REF))

    def attached(self) -> list[str]:
        return [c.attach.handoff_id for c in self.heard if c.WhichOneof("command") == "attach"]

    def cancels(self) -> list[tuple[str, ...]]:
        return [tuple(c.cancel.request_ids) for c in self.heard if c.WhichOneof("command") == "cancel"]


@asynccontextmanager
async def listening(num_tokens: int = 0) -> AsyncIterator[tuple[Listener, DecodeSession]]:
    listener, server = Listener(num_tokens), RpcServer(ServerConfig(), ())
    decode_pb2_grpc.add_DecodeServicer_to_server(listener, server.grpc_server)
    address = f"127.0.0.1:{await server.start()}"
    info = WorkerInfo(REF, WorkerKind.DECODE, address, "m", FakeModel().layout, ("local",), 512, 128)
    async with open_channel(address) as channel:
        session = DecodeSession(info, channel, 5.0, lambda _: None)
        yield listener, session
        session.close("the test is over")
    await server.stop(0)


async def test_those_who_leave_at_once_are_one_command() -> None:
    inbox = Inbox()
    ids = [f"h{i}" for i in range(100)]
    async with listening() as (listener, session):
        for ident in ids:
            session.attach(ident, 5.0, inbox)
        await until(lambda: listener.attached() == ids)
        for ident in ids:
            session.cancel(ident)
            session.cancel(ident)  # heard already
        await until(lambda: listener.cancels())
        session.attach("after", 5.0, inbox)
        await until(lambda: "after" in listener.attached())
        assert listener.cancels() == [tuple(ids)]


async def test_no_cancel_overtakes_the_attach_that_it_is_for() -> None:
    inbox = Inbox()
    async with listening() as (listener, session):
        for ident in ("a", "b"):  # all of it before the session is open
            session.attach(ident, 5.0, inbox)
            session.cancel(ident)
        session.attach("c", 5.0, inbox)
        await until(lambda: "c" in listener.attached())
        session.cancel("c")
        await until(lambda: len(listener.cancels()) == 3)
        kinds = [c.WhichOneof("command") for c in listener.heard]
        assert kinds == ["attach", "cancel", "attach", "cancel", "attach", "cancel"]
        assert listener.cancels() == [("a",), ("b",), ("c",)]


async def test_an_answer_that_nobody_reads_is_bounded_and_its_worker_told() -> None:
    unread, read = Inbox(max_unread=50), Inbox(max_unread=50)
    async with listening(num_tokens=200) as (listener, session):
        session.attach("unread", 5.0, unread)
        await until(lambda: listener.cancels() == [("unread",)])
        session.attach("read", 5.0, read)
        seen = 0
        while seen < 200:
            event = await read.get()
            assert isinstance(event, DecodeTokens)
            assert event.delta.first_index == seen
            seen += len(event.delta.token_ids)
        event = await unread.get()
        assert isinstance(event, TimeUp)
        assert isinstance(event.error, DeadlineExceeded)
        assert listener.cancels() == [("unread",)]
