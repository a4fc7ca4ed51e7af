"""Prefill legs over a real connection: on one session, refused, aimed anew, cancelled at any moment."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import grpc
import pytest

from contracts.errors import Unavailable
from contracts.kv_layout import KVLayout
from contracts.pb.diptych.v1 import prefill_pb2
from contracts.prefill import Target
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from router.serving.inbox import Inbox, PrefillEnded
from router.serving.legs import PrefillLine
from rpc.channel import open_channel

REQUEST = GenerationRequest("r", (1, 2, 3), SamplingParams(max_tokens=2))


def target(handoff_id):
    return Target(handoff_id, WorkerRef("d", 1), "h:1")


class Listener(grpc.GenericRpcHandler):
    """Notes every command; refuses every session, before it has read any, while `refusing`."""

    def __init__(self):
        self.refusing = False
        self.commands: list[str] = []
        self.sessions = 0

    def service(self, details):
        del details

        async def session(requests, context):
            self.sessions += 1
            if self.refusing:
                await context.abort(grpc.StatusCode.UNAVAILABLE, "not today")
            async for command in requests:
                which = command.WhichOneof("command")
                if which == "cancel":
                    self.commands += [f"cancel {request_id}" for request_id in command.cancel.request_ids]
                else:
                    self.commands.append((command.run if which == "run" else command.retarget).target.handoff_id)
            yield prefill_pb2.PrefillBatch()

        decode = prefill_pb2.PrefillCommand.FromString
        return grpc.stream_stream_rpc_method_handler(session, decode, prefill_pb2.PrefillBatch.SerializeToString)

    async def hears(self, *commands):
        async with asyncio.timeout(5):
            while self.commands != list(commands):
                await asyncio.sleep(0.005)


@asynccontextmanager
async def line_to(listener):
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((listener,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    layout = KVLayout("m", "float32", 1, 1, 8, 16)
    info = WorkerInfo(WorkerRef("p", 1), WorkerKind.PREFILL, f"127.0.0.1:{port}", "m", layout, (), 64, 64)
    async with open_channel(info.address) as channel:
        await channel.channel_ready()
        line = PrefillLine(info, channel, 3.0)
        yield line
        line.close("the test is over")
    await server.stop(0)


async def ended(inbox):
    async with asyncio.timeout(5):
        event = await inbox.get()
    assert isinstance(event, PrefillEnded)
    return event.error


async def test_all_that_is_said_comes_in_order_on_one_session():
    listener = Listener()
    async with line_to(listener) as line:
        leg, other = line.leg(Inbox()), line.leg(Inbox())
        assert listener.sessions == 0
        leg.start(REQUEST, target("first"))
        leg.retarget(target("second"))
        await listener.hears("first", "second")
        other.start(replace(REQUEST, request_id="other"), target("other"))
        leg.retarget(target("third"))
        await listener.hears("first", "second", "other", "third")
        leg.retarget(target("never said"))
        leg.cancel()
        other.cancel()
        await listener.hears("first", "second", "other", "third", "cancel r", "cancel other")
        assert listener.sessions == 1


@pytest.mark.parametrize("turns", [0, 1, 3, 30])
@pytest.mark.parametrize("started", [True, False])
async def test_cancelled_at_any_moment_it_leaves_nothing_and_others_go_on(turns, started):
    listener, inbox = Listener(), Inbox()
    async with line_to(listener) as line:
        leg = line.leg(inbox)
        if started:
            leg.start(REQUEST, target("first"))
        for _ in range(turns):
            await asyncio.sleep(0)
        leg.cancel()
        leg.cancel()
        after = line.leg(Inbox())  # whatever the worker had of the one before, it had first
        after.start(replace(REQUEST, request_id="after"), target("after"))
        async with asyncio.timeout(5):
            while "after" not in listener.commands:
                await asyncio.sleep(0.005)
        assert listener.commands in (["after"], ["first", "cancel r", "after"])
        assert listener.sessions == 1


async def test_a_worker_that_refuses_a_session_as_it_begins_is_at_no_fault():
    """Its reason may be lost on the way, because something was being written to it; never is it an internal error then."""
    listener, errors = Listener(), []
    listener.refusing = True
    async with line_to(listener) as line:
        for _ in range(300):
            inbox = Inbox()
            leg = line.leg(inbox)
            leg.start(REQUEST, target("h"))
            errors.append(await ended(inbox))
    assert all(isinstance(error, Unavailable) for error in errors), set(map(type, errors))
    assert sum("not today" in error.message for error in errors) > 0.9 * len(errors)


async def test_where_the_connection_does_not_stand_it_is_made_first():
    listener = Listener()
    async with line_to(listener) as line, open_channel(line.worker.address) as cold:
        other = PrefillLine(line.worker, cold, 3.0)
        leg = other.leg(Inbox())
        assert listener.sessions == 0
        leg.start(REQUEST, target("first"))
        await listener.hears("first")
        other.close("the test is over")
