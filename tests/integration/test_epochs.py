"""Every message between router and workers is meant for one life of a worker, and says so in both directions.

The hand-off's messages have theirs in tests/unit/kv_transfer/test_receiver.py (requests) and test_sender.py (answers).
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from contracts.errors import Unavailable, WorkerLost
from contracts.pb.diptych.v1 import decode_pb2, prefill_pb2
from contracts.prefill import FirstTokens, Target
from contracts.worker import WorkerInfo, WorkerKind
from router.serving.inbox import DecodeLost, DecodeTokens, Inbox, PrefillEnded
from router.serving.legs import DecodeSession, PrefillLine
from rpc.channel import open_channel
from tests.integration.pools import MODEL, Prefilling, Setup, pools, request
from tests.integration.router_harness import router_config, running_router

NEXT = "expected 2, got 1"  # what a worker says in its second life to a message for the first


def info(served, kind, epoch):
    ref = replace(served.ref, epoch=epoch)
    return WorkerInfo(ref, kind, served.address, "m", MODEL.layout, ("local",), 512, 128)


@asynccontextmanager
async def lives(epoch):
    async with pools(Setup(epoch=epoch)) as made:
        yield made


async def first_news(inbox):
    async with asyncio.timeout(5):
        return await inbox.get()


@pytest.mark.parametrize("command", ["attach", "generate"])
async def test_a_decode_worker_that_started_again_refuses_what_is_meant_for_its_last_life(command):
    async with lives(epoch=2) as made:
        inbox, lost = Inbox(), []
        session = DecodeSession(info(made.decode[0], WorkerKind.DECODE, 1), made.decode[0].channel, 3.0, lost.append)
        if command == "attach":
            session.attach("h", 20.0, inbox)
        else:
            session.generate(request(20, 3), inbox)
        news = await first_news(inbox)
        assert isinstance(news, DecodeLost)
        assert isinstance(news.error, Unavailable)
        assert not isinstance(news.error, WorkerLost), "nobody died of it"
        assert NEXT in news.error.message
        assert len(lost) == 1
        await made.idle()


async def test_a_prefill_worker_that_started_again_refuses_what_is_meant_for_its_last_life():
    async with lives(epoch=2) as made:
        inbox = Inbox()
        line = PrefillLine(info(made.prefill[0], WorkerKind.PREFILL, 1), made.prefill[0].channel, 3.0)
        line.leg(inbox).start(request(20, 3), Target("h", made.decode[0].ref, made.decode[0].address))
        ended = await first_news(inbox)
        assert isinstance(ended, PrefillEnded)
        assert isinstance(ended.error, Unavailable)
        assert NEXT in ended.error.message
        await made.idle()


async def test_a_target_in_a_life_that_is_over_fails_at_its_first_message():
    async with lives(epoch=2) as made:
        prefilling = Prefilling(made.prefill[0])
        target = made.target()
        target.decode.epoch = 1
        await prefilling.run(request(20, 3), target)
        await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        assert failed.handoff_id == target.handoff_id
        assert NEXT in failed.error.message
        prefilling.call.cancel()
        await made.idle()


@pytest.mark.parametrize("kind", list(WorkerKind))
async def test_what_another_life_answers_is_not_believed(tmp_path, kind):
    """It sits at the address of the one that was asked, and does not check what is meant for whom."""
    async with running_router(router_config(tmp_path)) as running:
        prefill, decode = await running.cluster.pools(1, 1)
        worker = {WorkerKind.PREFILL: prefill, WorkerKind.DECODE: decode}[kind][0]
        inbox = Inbox()
        async with open_channel(worker.info.address) as channel:
            if kind is WorkerKind.PREFILL:
                line = PrefillLine(worker.info, channel, 3.0)
                line.leg(inbox).start(request(5, 3), Target("h", decode[0].ref, decode[0].info.address))
                assert isinstance(await first_news(inbox), FirstTokens)
                line.close("over")
            else:
                session = DecodeSession(worker.info, channel, 3.0, lambda info: None)
                session.generate(request(5, 3), inbox)
                assert isinstance(await first_news(inbox), DecodeTokens)
                session.close("over")
            inbox = Inbox()
            known = replace(worker.info, ref=replace(worker.ref, epoch=worker.ref.epoch + 1))
            if kind is WorkerKind.PREFILL:
                leg = PrefillLine(known, channel, 3.0).leg(inbox)
                leg.start(request(5, 3), Target("h", decode[0].ref, decode[0].info.address))
                news = await first_news(inbox)
                assert isinstance(news, PrefillEnded)
            else:
                session = DecodeSession(known, channel, 3.0, lambda info: None)
                session.generate(request(5, 3), inbox)
                news = await first_news(inbox)
                assert isinstance(news, DecodeLost)
            assert "expected 2, got 1" in news.error.message


def test_the_two_streams_name_the_worker_in_every_message():
    for file, names, field in (
        (decode_pb2, ("DecodeCommand", "DecodeBatch"), "decode"),
        (prefill_pb2, ("PrefillCommand", "PrefillBatch"), "prefill"),
    ):
        for name in names:
            message = file.DESCRIPTOR.message_types_by_name[name]
            assert message.fields_by_name[field].message_type.full_name == "diptych.v1.WorkerRef"
