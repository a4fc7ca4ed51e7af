"""Bytes that change on their way cost a second push, never a wrong token: whole pools, and the router before them."""

import asyncio
import random
from contextlib import AsyncExitStack
from dataclasses import replace

import pytest

from contracts.clock import MonotonicClock
from contracts.sampling import SamplingParams
from contracts.worker import WorkerRef
from decode_service.worker import AnswerConfig, DecodeWorker
from engine.config import EngineConfig
from engine.engine import Engine
from engine.execution.fake import FakeRunner, expected_tokens
from kv_transfer.config import Integrity, ReceiverConfig
from kv_transfer.links import Side
from kv_transfer.local import Delivery, WriteFault
from kv_transfer.region import SharedRegion
from observability.handoff_metrics import ReceiverMetrics
from observability.worker_metrics import WorkerMetrics
from prefill_service.peer import PeerPool
from prefill_service.run import RunConfig
from prefill_service.worker import PrefillWorker
from rpc.lifecycle import Lifecycle
from rpc.process import StopSignals, run_process
from rpc.server import RpcServer, ServerConfig
from tests.integration.pools import FAST_SENDER, MODEL, Decoding, Prefilling, Setup, joined, pools, request
from tests.integration.test_router_pools import FAKE, served, tokens

SAMPLED_TEXT = SamplingParams(temperature=1.0, seed=3)


def checked(faults, integrity=Integrity.FULL, **changes):
    """Pools that verify, with a faulty line between them."""
    return Setup(
        faults=faults,
        run=RunConfig(replace(FAST_SENDER, integrity=integrity), hold_s=10.0),
        answers=AnswerConfig(ReceiverConfig(integrity=integrity)),
        **changes,
    )


def counted(served_decode):
    """The counter of one decode worker, as a scrape reads it."""
    metrics = WorkerMetrics("m", "decode")
    counts = ReceiverMetrics(metrics.registry, "m")
    served_decode.worker.on_mismatch = counts.digest_mismatch
    return lambda: metrics.registry.get_sample_value("diptych_kv_digest_mismatch_total")


@pytest.mark.parametrize("delivery", [Delivery.CORRUPT, Delivery.LOSE])
async def test_wrong_bytes_are_told_counted_and_pushed_again(delivery):
    def faults(index):
        return WriteFault(delivery, flipped_bit=12_345) if index == 0 else WriteFault()

    async with pools(checked(faults)) as made:
        mismatches = counted(made.decode[0])
        decoding = Decoding(made.decode[0])
        asked, target, prefilling = request(40, 5), made.target(), Prefilling(made.prefill[0])
        await decoding.attach(target.handoff_id)
        await prefilling.run(asked, target)
        first = await prefilling.first()
        failed = (await prefilling.event()).handoff_failed.error
        assert failed.code == "FAILED_PRECONDITION" and "not those that prefill-0 sent" in failed.message
        (lost,) = await decoding.whole(target.handoff_id)
        assert lost.error is not None and not lost.token_ids
        assert mismatches() == 1.0
        again = made.target()
        await prefilling.retarget(again)
        handed_off = (await prefilling.event()).handed_off
        assert handed_off.handoff_id == again.handoff_id
        assert handed_off.stats.num_cached_blocks == 0, "the blocks of the first push have no name"
        await decoding.attach(again.handoff_id)
        answer = joined([first, *await decoding.whole(again.handoff_id)])
        assert answer.token_ids == expected_tokens(asked, MODEL)
        assert mismatches() == 1.0
        await decoding.close()
        await made.idle()


async def test_a_noisy_line_costs_time_and_no_token():
    chance = random.Random(5)
    kinds = (Delivery.CORRUPT, Delivery.LOSE)

    def faults(index):
        return (
            WriteFault(chance.choice(kinds), flipped_bit=chance.getrandbits(20))
            if chance.random() < 0.3
            else WriteFault()
        )

    async with pools(checked(faults, prefill_blocks=48, decode_blocks=48)) as made:
        mismatches, failures = counted(made.decode[0]), 0
        decoding = Decoding(made.decode[0])

        async def one(index):
            nonlocal failures
            asked = request(chance.randrange(1, 100), chance.randrange(2, 12), replace(SAMPLED_TEXT, seed=index))
            target, prefilling = made.target(), Prefilling(made.prefill[0])
            await prefilling.run(asked, target)
            first = await prefilling.first()
            while (await prefilling.event()).WhichOneof("event") != "handed_off":
                failures += 1
                target = made.target()
                await prefilling.retarget(target)
            await decoding.attach(target.handoff_id)
            answer = joined([first, *await decoding.whole(target.handoff_id)])
            assert answer.token_ids == expected_tokens(asked, MODEL)

        await asyncio.gather(*(one(index) for index in range(24)))
        assert mismatches() == failures > 0
        await decoding.close()
        await made.idle()


@pytest.mark.parametrize("also_shared_before", [False, True])
async def test_a_block_that_changes_in_the_prefix_cache_is_not_shared(also_shared_before):
    async with pools(checked(lambda index: WriteFault())) as made:
        mismatches = counted(made.decode[0])
        decoding = Decoding(made.decode[0])

        async def push(asked):
            target, prefilling = made.target(), Prefilling(made.prefill[0])
            await decoding.attach(target.handoff_id)
            await prefilling.run(asked, target)
            first, event = await prefilling.first(), await prefilling.event()
            while event.WhichOneof("event") != "handed_off":
                target = made.target()
                await decoding.attach(target.handoff_id)
                await prefilling.retarget(target)
                event = await prefilling.event()
            answer = joined([first, *await decoding.whole(target.handoff_id)])
            assert answer.token_ids == expected_tokens(asked, MODEL)
            return event.handed_off.stats.num_cached_blocks

        assert await push(request(64, 5, salt=1)) == 0
        if also_shared_before:
            assert await push(request(64, 5, salt=1)) == 4
        await made.decode[0].idle()
        memory = made.decode[0].region.buffer
        for offset in range(0, len(memory), MODEL.layout.block_bytes):
            memory[offset + 7] ^= 16  # in every block, wherever the cached ones are
        assert await push(request(64, 5, salt=1)) == 0, "pushed whole, not shared"
        assert mismatches() == 1.0
        assert await push(request(64, 5, salt=1)) == 4
        assert mismatches() == 1.0
        await decoding.close()
        await made.idle()


async def test_a_client_of_the_router_sees_nothing_of_it(tmp_path):
    def faults(index):
        return WriteFault(Delivery.CORRUPT, flipped_bit=99) if index < 2 else WriteFault()

    setup = checked(faults, model=FAKE, num_decode=2)
    async with served(tmp_path, setup) as (running, workers):
        mismatches = [counted(decode) for decode in workers.decode]
        # First: a decode worker that has the prompt's blocks already is sent none of them.
        answer = await tokens(running, prompt=list(range(40, 120)), diptych={"route": "disaggregated"})
        alone = await tokens(running, diptych={"route": "colocated"})
        assert answer["choices"][0]["token_ids"] == alone["choices"][0]["token_ids"]
        assert sum(count() for count in mismatches) >= 1.0
        assert await running.metric("diptych_failed_handoffs_total") == sum(count() for count in mismatches), (
            "pushed again"
        )
        await workers.idle()


@pytest.mark.parametrize("integrity", [Integrity.SAMPLED, Integrity.FULL])
@pytest.mark.parametrize("connector", ["local", "shm", "tcp"])
async def test_good_bytes_pass_on_every_connector(connector, integrity):
    async with pools(checked(lambda index: WriteFault(), integrity, connector=connector)) as made:
        mismatches = counted(made.decode[0])
        decoding = Decoding(made.decode[0])
        for num_prompt in (1, 15, 16, 17, 100):
            asked, target, prefilling = request(num_prompt, 4), made.target(), Prefilling(made.prefill[0])
            await decoding.attach(target.handoff_id)
            await prefilling.run(asked, target)
            first = await prefilling.first()
            assert (await prefilling.event()).WhichOneof("event") == "handed_off"
            answer = joined([first, *await decoding.whole(target.handoff_id)])
            assert answer.token_ids == expected_tokens(asked, MODEL)
        assert mismatches() == 0.0
        await decoding.close()
        await made.idle()


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_books_that_do_not_add_up_when_it_is_idle_end_the_process(kind, caplog):
    def leak(engine):
        engine._kv.lease("nobody", 16, (), 0)
        engine.admit(request(4, 1))

    async def serve():
        async with StopSignals() as signals, AsyncExitStack() as stack:
            clock, region = MonotonicClock(), stack.enter_context(SharedRegion(8 * MODEL.layout.block_bytes))
            engine = Engine(FakeRunner(MODEL, 8, region.buffer), EngineConfig(), clock)
            side = Side(WorkerRef("w", 1), MODEL.layout, (), clock)
            if kind == "prefill":
                worker = PrefillWorker(side, engine, PeerPool(clock), RunConfig())
            else:
                worker = DecodeWorker(side, engine, AnswerConfig())
            worker.start()
            worker.driver.post(leak)
            await Lifecycle(worker, RpcServer(ServerConfig(), ()), (), clock).run(signals)

    assert run_process(serve) == 1
    assert "leases live" in caplog.text
