"""Prefill and decode pools over real gRPC: same tokens, and nothing left behind whatever goes wrong and when."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from contracts.errors import ErrorCode, InvalidRequest, Overloaded
from contracts.request import FinishReason, GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerRef, WorkerState
from decode_service.outputs import OutputConfig
from decode_service.worker import AnswerConfig
from engine.config import SchedulerConfig
from engine.execution.fake import expected_tokens
from kv_transfer.config import SenderConfig
from kv_transfer.local import Delivery, WriteFault
from kv_transfer.nixl_agent import why_not
from prefill_service.run import RunConfig
from router.serving.progress import as_exception
from rpc.errors import from_rpc_error
from tests.integration.pools import (
    MODEL,
    Decoding,
    Prefilling,
    Setup,
    disaggregated,
    held,
    joined,
    pools,
    request,
    until,
)

SAMPLED = SamplingParams(temperature=1.0, top_p=0.9, seed=7, logprobs=2)


@pytest.mark.parametrize("staging_slots", [0, 24])
@pytest.mark.parametrize("connector", ["local", "shm", "tcp", "nixl"])
async def test_many_requests_at_once_get_their_own_tokens(connector: str, staging_slots: int) -> None:
    if connector == "nixl" and why_not() is not None:
        pytest.skip(why_not() or "")
    setup = Setup(num_prefill=2, num_decode=2, connector=connector, staging_slots=staging_slots)
    async with pools(setup) as made:
        decodings = [Decoding(served) for served in made.decode]

        async def one(index: int) -> None:
            sampling = replace(SAMPLED, seed=index) if index % 2 else None
            asked = request(1 + index * 7 % 150, 1 + index % 12, sampling, eos=True)
            prefill, decode = index % 2, index // 2 % 2
            answer = await disaggregated(made, decodings[decode], asked, prefill, decode)
            assert answer.token_ids == expected_tokens(asked, MODEL)
            if answer.handed_off is not None:
                assert answer.handed_off.stats.connector == connector

        await asyncio.gather(*(one(index) for index in range(48)))
        for decoding in decodings:
            await decoding.close()
        await made.idle()


async def test_alone_gives_the_same_tokens() -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        asked = [request(5 + 9 * index, 10, SAMPLED) for index in range(12)]
        for one in asked:
            await decoding.generate(one)
        for one in asked:
            answer = joined(await decoding.whole(one.request_id))
            assert answer.token_ids == expected_tokens(one, MODEL)
        await decoding.close()
        await made.idle()


async def test_the_first_token_keeps_its_logprobs_and_stages_are_told() -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        answer = await disaggregated(made, decoding, request(40, 5, SAMPLED))
        assert [len(delta.logprobs) for delta in answer.deltas] == [1] * 5
        assert answer.handed_off is not None
        assert answer.handed_off.stats.num_blocks == 3
        stages = answer.handed_off.stages
        assert stages.prefill_compute_s > 0
        assert stages.transfer_s >= 0
        assert stages.commit_s > 0
        last = answer.deltas[1].stages
        assert last is not None
        assert last.first_step_s > 0
        await decoding.close()
        await made.idle()


async def test_blocks_that_decode_has_are_not_sent() -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        first = await disaggregated(made, decoding, request(70, 3, salt=1))
        again = await disaggregated(made, decoding, request(70, 3, salt=1))
        assert first.token_ids == again.token_ids
        assert first.handed_off is not None
        assert again.handed_off is not None
        assert (first.handed_off.stats.num_blocks, first.handed_off.stats.num_cached_blocks) == (5, 0)
        assert (again.handed_off.stats.num_blocks, again.handed_off.stats.num_cached_blocks) == (1, 4)
        assert again.deltas[0].num_cached_tokens == 64
        await decoding.close()
        await made.idle()


async def test_an_answer_that_ends_at_its_first_token_is_not_handed_off() -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        one = await disaggregated(made, decoding, request(40, 1))
        assert (len(one.token_ids), one.finish_reason) == (1, FinishReason.LENGTH)
        asked = request(40, 9)
        (token_id, *_) = expected_tokens(asked, MODEL)
        stops = replace(asked, sampling=replace(asked.sampling, stop_token_ids=(token_id,)))
        stopped = await disaggregated(made, decoding, stops)
        assert (stopped.token_ids, stopped.finish_reason) == ((token_id,), FinishReason.STOP)
        assert stopped.deltas[0].stop_token_id == token_id
        await decoding.close()
        await made.idle()


async def test_a_continuation_goes_on_at_its_next_token() -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        asked = request(30, 10, SAMPLED)
        whole = expected_tokens(asked, MODEL)
        begun = replace(asked, output_token_ids=whole[:4])
        target = made.target()
        prefilling = Prefilling(made.prefill[0])
        await prefilling.run(begun, target)
        first = await prefilling.first()
        assert (first.first_index, first.token_ids) == (4, whole[4:5])
        assert (await prefilling.event()).WhichOneof("event") == "handed_off"
        await decoding.attach(target.handoff_id)
        rest = await decoding.whole(target.handoff_id)
        assert [delta.first_index for delta in rest] == list(range(5, 10))
        assert tuple(token for delta in rest for token in delta.token_ids) == whole[5:]
        await decoding.close()
        await made.idle()


async def test_the_first_token_does_not_wait_for_the_kv() -> None:
    stalled = WriteFault(delay_s=60.0)
    async with pools(Setup(faults=lambda index: stalled)) as made:
        prefilling = Prefilling(made.prefill[0])
        await prefilling.run(request(40, 9), made.target())
        assert (await prefilling.first()).token_ids
        prefilling.call.cancel()
        await made.idle()


@pytest.mark.parametrize("moment", ["at once", "first token", "handed off", "second token"])
async def test_a_client_that_leaves_frees_both_pools(moment: str) -> None:
    async with pools(Setup(step_s=0.002)) as made:
        decoding = Decoding(made.decode[0])

        async def one() -> None:
            target, prefilling = made.target(), Prefilling(made.prefill[0])
            await decoding.attach(target.handoff_id)
            await prefilling.run(request(100, 300), target)
            if moment != "at once":
                await prefilling.first()
            if moment in ("handed off", "second token"):
                assert (await prefilling.event()).WhichOneof("event") == "handed_off"
            if moment == "second token":
                await decoding.some(target.handoff_id, 1)
            prefilling.call.cancel()
            await decoding.cancel(target.handoff_id)
            (*_, last) = await decoding.whole(target.handoff_id)
            assert last.finish_reason in (FinishReason.ABORT, FinishReason.ERROR)

        await asyncio.gather(*(one() for _ in range(6)))
        await made.idle()
        asked = request(50, 5)
        assert (await disaggregated(made, decoding, asked)).token_ids == expected_tokens(asked, MODEL)
        await decoding.close()
        await made.idle()


@pytest.mark.parametrize("turns", range(0, 60, 4))
async def test_leaving_after_any_number_of_turns_frees_both_pools(turns: int) -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        target, prefilling = made.target(), Prefilling(made.prefill[0])
        await decoding.attach(target.handoff_id)
        await prefilling.run(request(150, 100), target)
        for _ in range(turns):
            await asyncio.sleep(0)
        prefilling.call.cancel()
        await decoding.close()
        await made.idle()
        assert made.decode[0].worker.receiver.counts() == {}


async def test_no_room_then_room() -> None:
    async with pools(Setup(decode_blocks=8, step_s=0.002)) as made:
        decoding = Decoding(made.decode[0])
        hog = request(60, 60)
        await decoding.generate(hog)
        await decoding.some(hog.request_id, 1)
        asked = request(100, 5)
        waiting = asyncio.create_task(disaggregated(made, decoding, asked))
        assert joined(await decoding.whole(hog.request_id)).token_ids == expected_tokens(hog, MODEL)
        assert (await waiting).token_ids == expected_tokens(asked, MODEL)
        await decoding.close()
        await made.idle()


async def test_tight_pools_do_not_deadlock() -> None:
    async with pools(Setup(prefill_blocks=12, decode_blocks=12)) as made:
        decoding = Decoding(made.decode[0])

        async def one(index: int) -> None:
            asked = request(20 + index * 3, 12 + index)
            assert (await disaggregated(made, decoding, asked)).token_ids == expected_tokens(asked, MODEL)

        await asyncio.gather(*(one(index) for index in range(16)))
        await decoding.close()
        await made.idle()


async def test_a_refusing_decode_worker_costs_a_second_push_not_a_second_prefill() -> None:
    sender = SenderConfig(reserve_timeout_s=0.2)
    async with pools(Setup(num_decode=2, decode_blocks=8, run=RunConfig(sender, 10.0), step_s=0.01)) as made:
        hogging, decoding = Decoding(made.decode[0]), Decoding(made.decode[1])
        hog = request(60, 60)
        await hogging.generate(hog)
        await hogging.some(hog.request_id, 1)
        asked, target, prefilling = request(100, 5), made.target(made.decode[0]), Prefilling(made.prefill[0])
        await hogging.attach(target.handoff_id)
        await prefilling.run(asked, target)
        first = await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        assert (failed.handoff_id, failed.error.code, failed.error.retryable) == (
            target.handoff_id,
            "RESOURCE_EXHAUSTED",
            True,
        )
        steps = made.prefill[0].worker.driver.num_steps
        second = made.target(made.decode[1])
        await prefilling.retarget(second)
        await decoding.attach(second.handoff_id)
        done = (await prefilling.event()).handed_off
        assert done.handoff_id == second.handoff_id
        answer = joined([first, *await decoding.whole(second.handoff_id)])
        assert answer.token_ids == expected_tokens(asked, MODEL)
        assert made.prefill[0].worker.driver.num_steps == steps
        await hogging.close()
        await decoding.close()
        await made.idle()


async def test_a_failed_transfer_is_told_and_the_kv_is_held_for_another_target() -> None:
    def faults(index: int) -> WriteFault:
        return WriteFault(Delivery.FAIL, landed_bytes=100) if index == 0 else WriteFault()

    async with pools(Setup(faults=faults)) as made:
        decoding = Decoding(made.decode[0])
        asked, target, prefilling = request(40, 5), made.target(), Prefilling(made.prefill[0])
        await decoding.attach(target.handoff_id)
        await prefilling.run(asked, target)
        first = await prefilling.first()
        assert (await prefilling.event()).handoff_failed.error.code == "UNAVAILABLE"
        (lost,) = await decoding.whole(target.handoff_id)
        assert lost.error is not None
        again = made.target()
        await prefilling.retarget(again)
        assert (await prefilling.event()).handed_off.handoff_id == again.handoff_id
        await decoding.attach(again.handoff_id)
        answer = joined([first, *await decoding.whole(again.handoff_id)])
        assert answer.token_ids == expected_tokens(asked, MODEL)
        await decoding.close()
        await made.idle()


async def test_the_kv_is_held_only_for_a_while() -> None:
    setup = Setup(faults=lambda index: WriteFault(Delivery.FAIL), run=RunConfig(hold_s=0.05))
    async with pools(setup) as made:
        prefilling = Prefilling(made.prefill[0])
        await prefilling.run(request(40, 5), made.target())
        await prefilling.first()
        assert (await prefilling.event()).handoff_failed.hold_s == 0.05
        refused = await prefilling.refused()
        assert (refused.code, refused.retryable) == (ErrorCode.NOT_FOUND, True)
        await made.idle()


async def handoff_error(setup: Setup, decode_ref: WorkerRef | None = None, address: str | None = None) -> str:
    """The message with which a hand-off fails."""
    async with pools(setup) as made:
        if decode_ref is not None:
            made.decode[0].ref = decode_ref
        target, prefilling = made.target(), Prefilling(made.prefill[0])
        if address is not None:
            target.address = address
        await prefilling.run(request(40, 5), target)
        await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        prefilling.call.cancel()
        await made.idle()
        return failed.error.message


async def test_another_life_of_a_decode_worker_is_refused() -> None:
    assert "epoch of decode-0" in await handoff_error(Setup(), WorkerRef("decode-0", 7))


async def test_another_layout_is_refused_and_named() -> None:
    other = replace(MODEL, layout=replace(MODEL.layout, hash_seed=5))
    assert "hash_seed" in await handoff_error(Setup(decode_model=other))


async def test_nobody_at_the_address_fails_the_hand_off_not_the_worker() -> None:
    sender = SenderConfig(reserve_timeout_s=0.3, call_timeout_s=0.2)
    message = await handoff_error(Setup(run=RunConfig(sender, 10.0)), address="127.0.0.1:1")
    assert "does not answer" in message


async def test_attaching_to_what_never_comes_is_a_retryable_error() -> None:
    async with pools() as made:
        decoding = Decoding(made.decode[0])
        await decoding.attach("nobody", 0.05)
        (delta,) = await decoding.whole("nobody")
        assert delta.error is not None
        assert (delta.error.code, delta.error.retryable) == (ErrorCode.NOT_FOUND, True)
        await decoding.close()


async def test_a_hand_off_that_nobody_attaches_to_is_aborted() -> None:
    answers = AnswerConfig(outputs=OutputConfig(claim_wait_s=0.05), sweep_every_s=0.01)
    async with pools(Setup(answers=answers, step_s=0.002)) as made:
        target, prefilling = made.target(), Prefilling(made.prefill[0])
        await prefilling.run(request(40, 300), target)
        await prefilling.first()
        assert (await prefilling.event()).WhichOneof("event") == "handed_off"
        await made.idle()
        decoding = Decoding(made.decode[0])
        await decoding.attach(target.handoff_id)
        (delta,) = await decoding.whole(target.handoff_id)
        assert delta.finish_reason is FinishReason.ERROR
        await decoding.close()


async def test_a_session_that_breaks_takes_its_own_requests_and_no_others() -> None:
    async with pools(Setup(step_s=0.002)) as made:
        breaking, staying = Decoding(made.decode[0]), Decoding(made.decode[0])
        lost = [request(20, 400) for _ in range(4)]
        kept = request(20, 60)
        for one in lost:
            await breaking.generate(one)
        await staying.generate(kept)
        await breaking.some(lost[0].request_id, 1)
        await breaking.close()
        assert joined(await staying.whole(kept.request_id)).token_ids == expected_tokens(kept, MODEL)
        await made.decode[0].idle()
        await staying.close()


async def test_a_router_that_does_not_read_loses_its_session_and_the_others_go_on() -> None:
    async with pools(Setup(answers=AnswerConfig(session_batches=50), step_s=0.002)) as made:
        deaf, staying = made.decode[0].worker.desk.open_session(), Decoding(made.decode[0])
        made.decode[0].worker.desk.generate(deaf, request(20, 400))
        kept = request(20, 100)
        await staying.generate(kept)
        assert joined(await staying.whole(kept.request_id)).token_ids == expected_tokens(kept, MODEL)
        await until(lambda: deaf.closed)
        with pytest.raises(Overloaded):
            _ = [batch async for batch in deaf.items()]
        await made.decode[0].idle()
        await staying.close()


async def test_commands_that_cannot_be_read_hurt_only_their_sender() -> None:
    async with pools() as made:
        bad, good = Decoding(made.decode[0]), Decoding(made.decode[0])
        await bad.generate(replace(request(5, 5), request_id="x", prompt_token_ids=(10_000,)))
        (refused,) = await bad.whole("x")
        assert refused.error is not None
        assert refused.error.code is ErrorCode.INVALID_ARGUMENT
        await bad.attach("")
        await bad.whole("never")
        assert bad.error is not None
        assert isinstance(from_rpc_error(bad.error, "decode"), InvalidRequest)
        asked = request(5, 5)
        await good.generate(asked)
        assert joined(await good.whole(asked.request_id)).token_ids == expected_tokens(asked, MODEL)
        await good.close()


@pytest.mark.parametrize(
    ("change", "field"),
    [({"prompt_token_ids": ()}, "prompt"), ({"prompt_token_ids": (9999,)}, "prompt_token_ids")],
)
async def test_bad_requests_are_refused_by_name(change: dict[str, tuple[int, ...]], field: str) -> None:
    async with pools() as made:
        prefilling = Prefilling(made.prefill[0])
        await prefilling.run(replace(request(5, 5), **change), made.target())
        error = as_exception(await prefilling.refused())
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        await made.idle()


async def test_a_full_queue_says_when_to_come_back() -> None:
    scheduler = SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=1, max_waiting=1)
    async with pools(Setup(scheduler=scheduler, step_s=0.05)) as made:
        runs = [Prefilling(made.prefill[0]) for _ in range(6)]
        for prefilling in runs:
            await prefilling.run(request(200, 5), made.target())
        events = await asyncio.gather(*(prefilling.event() for prefilling in runs))
        refusals = [event.ended.error for event in events if event.HasField("ended")]
        assert refusals
        assert all((refusal.code, refusal.retry_after_s) == ("RESOURCE_EXHAUSTED", 1.0) for refusal in refusals)
        for prefilling in runs:
            prefilling.call.cancel()
        await made.idle()


async def test_draining_finishes_what_is_there_and_refuses_the_rest() -> None:
    async with pools(Setup(step_s=0.002)) as made:
        prefill, decode = made.prefill[0].worker, made.decode[0].worker
        decoding = Decoding(made.decode[0])
        asked = request(150, 120)
        target, prefilling = made.target(), Prefilling(made.prefill[0])
        await decoding.attach(target.handoff_id)
        with held(made.prefill[0]):  # who has drained ends its sessions, and refuses nobody any more
            await prefilling.run(asked, target)
            await until(lambda: decode.receiver.counts())
            draining = asyncio.gather(prefill.drain(60.0), decode.drain(60.0))
            await until(lambda: decode.load().state is WorkerState.DRAINING)
            refused = Prefilling(made.prefill[0])
            await refused.run(request(5, 5), made.target())
            assert (await refused.refused()).draining
            await decoding.attach("never reserved")
            (hopeless,) = await decoding.whole("never reserved")
            assert hopeless.error is not None
            assert hopeless.error.draining
            late = request(5, 5)
            await decoding.generate(late)
            (delta,) = await decoding.whole(late.request_id)
            assert delta.error is not None
            assert delta.error.draining
        first = await prefilling.first()
        assert (await prefilling.event()).WhichOneof("event") == "handed_off"
        await prefilling.ended()
        answer = joined([first, *await decoding.whole(target.handoff_id)])
        assert answer.token_ids == expected_tokens(asked, MODEL)
        async with asyncio.timeout(10):
            await draining
            await asyncio.wait((decoding._reading,))
        assert decoding.error is None
        await made.idle()


@pytest.mark.parametrize("seed", range(4))
async def test_faults_and_departures_at_random_never_cost_a_token_or_a_block(seed: int) -> None:
    chance = random.Random(seed)
    kinds = [WriteFault(Delivery.FAIL, landed_bytes=64), WriteFault(stall_s=0.02), WriteFault(delay_s=0.01)]
    plan = [chance.choice(kinds) if chance.random() < 0.4 else WriteFault() for _ in range(1000)]
    setup = Setup(num_decode=2, prefill_blocks=40, decode_blocks=40, faults=lambda index: plan[index % 1000])
    outcomes: list[str] = []
    async with pools(replace(setup, step_s=0.001)) as made:
        decodings = [Decoding(served) for served in made.decode]

        async def one(index: int) -> None:
            asked = request(chance.randrange(1, 120), chance.randrange(2, 20), replace(SAMPLED, seed=index))
            patience_s = chance.choice([0.005, 0.02, 0.1]) if chance.random() < 0.3 else 20.0
            prefilling, carrying = Prefilling(made.prefill[0]), []
            try:
                async with asyncio.timeout(patience_s):
                    answer = await with_retries(asked, prefilling, carrying)
            except TimeoutError:
                prefilling.call.cancel()
                for decode, handoff_id in carrying:
                    await decodings[decode].cancel(handoff_id)
                outcomes.append("left")
            else:
                assert answer == expected_tokens(asked, MODEL)
                outcomes.append("whole")

        async def with_retries(
            asked: GenerationRequest, prefilling: Prefilling, carrying: list[tuple[int, str]]
        ) -> tuple[int, ...]:
            decode = chance.randrange(2)
            target = made.target(made.decode[decode])
            carrying.append((decode, target.handoff_id))
            await decodings[decode].attach(target.handoff_id)
            await prefilling.run(asked, target)
            first = await prefilling.first()
            while (await prefilling.event()).WhichOneof("event") == "handoff_failed":
                decode = 1 - decode
                target = made.target(made.decode[decode])
                carrying.append((decode, target.handoff_id))
                await decodings[decode].attach(target.handoff_id)
                await prefilling.retarget(target)
                outcomes.append("retargeted")
            return joined([first, *await decodings[decode].whole(target.handoff_id)]).token_ids

        await asyncio.gather(*(one(index) for index in range(60)))
        await made.idle()
        for decoding in decodings:
            await decoding.close()
        await made.idle()
    assert outcomes.count("whole") > 20
    assert {"left", "retargeted"} <= set(outcomes)
