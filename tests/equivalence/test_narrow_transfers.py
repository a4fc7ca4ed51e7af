"""KV that travels as int8 or fp8 changes answers, but in one way only: that of packing and unpacking it, whatever carries it.

The truth is one engine that hands each prompt's KV to itself, packed and unpacked on the way by the readable functions.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from contracts.clock import MonotonicClock
from contracts.request import GenerationRequest
from decode_service.worker import AnswerConfig
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.kv_storage import kv_tensor
from kernels.packing import Form, pack, unpack
from kv_transfer.config import Integrity, ReceiverConfig
from kv_transfer.local import Delivery, WriteFault
from prefill_service.run import RunConfig
from tests.equivalence.truth import DTYPES, WHOLE, Said, loaded, real_model, requests
from tests.integration.pools import FAST_SENDER, Answer, Decoding, Prefilling, Setup, disaggregated, pools, until

ASKED = [replace(r, sampling=replace(r.sampling, ignore_eos=True)) for r in requests(16, salt="n")]
FORMS: tuple[Form, ...] = ("int8", "fp8")


def narrowed(asked: list[GenerationRequest], dtype: str, form: Form) -> dict[str, Said]:
    """Each request alone; the KV of its prompt is that of its first step, packed and unpacked once."""
    model, num_blocks = loaded(dtype=dtype), 32
    buffer = memoryview(bytearray(num_blocks * model.layout.block_bytes))
    cache, size = kv_tensor(buffer, model.layout, num_blocks), model.layout.block_size
    made = Engine(model.runner(buffer, num_blocks), EngineConfig(WHOLE), MonotonicClock())
    answers = {}
    for request in asked:
        made.admit(request, retain_kv=True)
        step = made.step()
        (first,), (kept,) = step.deltas, step.retained
        blocks = cache[kept.lease.block_ids]
        if used := kept.num_computed_tokens % size:
            blocks[-1, :, :, used:] = 0
        unpack(pack(blocks, form), blocks, form)
        made.release(kept.lease)
        lease = made.reserve(request.request_id, kept.num_computed_tokens, ())
        assert lease is not None
        cache[lease.block_ids] = blocks
        made.adopt(kept.request, lease, kept.num_computed_tokens)
        answer = Said(()).and_then(first)
        while made.has_work:
            for delta in made.step().deltas:
                answer = answer.and_then(delta)
        answers[request.request_id] = answer
    made.check_integrity()
    return answers


def said(answer: Answer) -> Said:
    whole = Said(())
    for delta in answer.deltas:
        whole = whole.and_then(delta)
    return whole


def setup(connector: str, dtype: str, form: str) -> Setup:
    """Every block is compared by digest; a prompt of 100 tokens takes several steps, and seven of the staging slots."""
    integrity = Integrity.FULL
    return Setup(
        num_prefill=2,
        num_decode=2,
        connector=connector,
        real=real_model(dtype=dtype),
        scheduler=SchedulerConfig(max_num_batched_tokens=48, max_num_seqs=8),
        run=RunConfig(replace(FAST_SENDER, integrity=integrity), hold_s=10.0),
        answers=AnswerConfig(ReceiverConfig(integrity=integrity)),
        staging_slots=24,
        transfer_dtype=form,
    )


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("connector", ["local", "shm", "tcp"])
async def test_answers_are_those_of_one_engine_whose_kv_was_narrowed(connector: str, dtype: str, form: Form) -> None:
    expected, exact = narrowed(ASKED, dtype, form), real_model(dtype=dtype).layout
    sent = exact.sent_as(form).sent_block_bytes
    async with pools(setup(connector, dtype, form)) as made:
        decodings = [Decoding(served) for served in made.decode]

        async def one(index: int) -> None:
            answer = await disaggregated(made, decodings[index % 2], ASKED[index], index // 2 % 2, index % 2)
            assert said(answer) == expected[ASKED[index].request_id]
            assert answer.handed_off is not None
            stats = answer.handed_off.stats
            assert (stats.connector, stats.num_cached_blocks) == (connector, 0)
            assert stats.kv_bytes == sent * exact.num_blocks_for(len(ASKED[index].prompt_token_ids))

        await asyncio.gather(*(one(index) for index in range(len(ASKED))))
        for decoding in decodings:
            await decoding.close()
        await made.idle()


@pytest.mark.parametrize("form", FORMS)
async def test_leaving_amid_a_narrow_transfer_frees_blocks_and_slots(form: Form) -> None:
    stalled = WriteFault(delay_s=60.0)
    wide = replace(setup("local", "float32", form), num_prefill=1, num_decode=1, faults=lambda index: stalled)
    async with pools(wide) as made:
        prefilling, decoding, target = Prefilling(made.prefill[0]), Decoding(made.decode[0]), made.target()
        await decoding.attach(target.handoff_id)
        await prefilling.run(ASKED[0], target)
        assert (await prefilling.first()).token_ids
        lent = [served.staging for served in (*made.prefill, *made.decode)]
        await until(lambda: all(area is not None and area.num_free < area.num_slots for area in lent))
        prefilling.call.cancel()
        await decoding.close()
        await made.idle()  # slots, too
        assert made.decode[0].worker.receiver.counts() == {}


async def test_a_narrow_transfer_that_fails_or_takes_too_long_frees_blocks_and_slots() -> None:
    for fault, patience_s in ((WriteFault(Delivery.FAIL), 10.0), (WriteFault(delay_s=60.0), 0.05)):
        sender = replace(FAST_SENDER, integrity=Integrity.FULL, write_timeout_s=patience_s)
        narrow = replace(
            setup("local", "float32", "int8"),
            num_prefill=1,
            num_decode=1,
            run=RunConfig(sender, hold_s=0.05),
            faults=lambda index, fault=fault: fault,
        )
        async with pools(narrow) as made:
            prefilling = Prefilling(made.prefill[0])
            await prefilling.run(ASKED[3], made.target())
            await prefilling.first()
            assert (await prefilling.event()).WhichOneof("event") == "handoff_failed"
            await made.idle()


@pytest.mark.parametrize(("ours", "theirs"), [("int8", "auto"), ("auto", "fp8"), ("int8", "fp8")])
async def test_workers_that_narrow_in_another_way_refuse_each_other_by_name(ours: str, theirs: str) -> None:
    unlike = replace(
        setup("shm", "float32", ours), num_prefill=1, num_decode=1, decode_transfer_dtype=theirs, staging_slots=0
    )
    async with pools(unlike) as made:
        prefilling = Prefilling(made.prefill[0])
        await prefilling.run(ASKED[0], made.target())
        await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        assert f"kv layout differs in transfer_dtype: ours {theirs!r}, theirs {ours!r}" in failed.error.message
        prefilling.call.cancel()
        await made.idle()


async def test_the_narrow_prompt_that_staging_has_no_room_for_is_refused_by_name() -> None:
    tight = replace(setup("shm", "float32", "fp8"), num_prefill=1, num_decode=1, staging_slots=2)
    longest = max(ASKED, key=lambda r: len(r.prompt_token_ids))
    async with pools(tight) as made:
        prefilling = Prefilling(made.prefill[0])
        await prefilling.run(longest, made.target())
        await prefilling.first()
        failed = (await prefilling.event()).handoff_failed
        assert "num_tokens: got 100, the KV staging area has room for 32 tokens at once" in failed.error.message
        prefilling.call.cancel()
        await made.idle()
