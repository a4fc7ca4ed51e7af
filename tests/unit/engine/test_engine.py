"""The engine's promises, one at a time: how answers end, what leaves with its KV, what is refused, what is reported."""

from dataclasses import replace

import pytest

from contracts.errors import ErrorCode, InvalidRequest, Overloaded
from contracts.request import FinishReason
from engine.config import EngineConfig
from engine.engine import Engine, EngineStuck
from engine.execution.fake import FakeModel, FakeRunner, expected_tokens
from engine.execution.interface import SampledToken
from engine.kv.lease import LeaseError
from engine.output import StepOutput
from engine.request import Request
from observability.samples import EngineSample
from observability.stages import StageTimes


def tokens_of(deltas) -> tuple[int, ...]:
    return tuple(token_id for delta in deltas for token_id in delta.token_ids)


# How answers end


def test_max_tokens_ends_with_length(make_engine, make_request, run, model):
    request = make_request(max_tokens=5)
    engine = make_engine()
    engine.admit(request)
    deltas = run(engine)["r"]
    assert tokens_of(deltas) == expected_tokens(request, model)
    assert [d.first_index for d in deltas] == [0, 1, 2, 3, 4]
    assert [d.finish_reason for d in deltas] == [None] * 4 + [FinishReason.LENGTH]
    assert deltas[-1].stop_token_id is None
    assert [d.stages is not None for d in deltas] == [True, True, False, False, False]


def test_a_stop_token_ends_with_stop_and_is_reported(make_engine, make_request, run, model):
    whole = expected_tokens(make_request(max_tokens=8), model)
    stop = whole[3]
    request = make_request(max_tokens=8, stop_token_ids=(stop,))
    engine = make_engine()
    engine.admit(request)
    deltas = run(engine)["r"]
    assert tokens_of(deltas) == whole[: whole.index(stop) + 1]
    assert (deltas[-1].finish_reason, deltas[-1].stop_token_id) == (FinishReason.STOP, stop)


@pytest.mark.parametrize("ignore_eos", [False, True])
def test_eos_ends_unless_ignored(make_engine, make_request, run, model, ignore_eos):
    eos = expected_tokens(make_request(), model)[1]
    with_eos = replace(model, eos_token_ids=frozenset({eos}))
    engine = make_engine(model=with_eos)
    request = make_request(ignore_eos=ignore_eos)
    engine.admit(request)
    deltas = run(engine)["r"]
    assert tokens_of(deltas) == expected_tokens(request, with_eos)
    assert deltas[-1].finish_reason is (FinishReason.LENGTH if ignore_eos else FinishReason.STOP)


class Repeater(FakeRunner):
    """A runner that always samples token 1, whatever it is asked to mask."""

    def execute(self, batch):
        results = super().execute(batch)
        return tuple(r if r.token_id is None else replace(r, token_id=1) for r in results)


def test_no_stop_counts_before_min_tokens(make_request, run, model, clock):

    engine = Engine(Repeater(model, 16), EngineConfig(), clock)
    engine.admit(make_request(max_tokens=9, min_tokens=3, stop_token_ids=(1,)))
    deltas = run(engine)["r"]
    assert tokens_of(deltas) == (1, 1, 1, 1)
    assert deltas[-1].finish_reason is FinishReason.STOP


# What leaves with its KV


def test_a_retaining_request_leaves_with_one_token_and_its_lease(make_engine, make_request, model):
    engine = make_engine()
    request = make_request(num_prompt=10, logprobs=0, deadline_s=50.0)
    engine.admit(request, retain_kv=True)
    output = engine.step()
    (delta,), (retained,), (progress,) = output.deltas, output.retained, output.progress
    assert delta.token_ids == expected_tokens(request, model)[:1]
    assert delta.finish_reason is None
    assert delta.stages is not None
    assert retained.request == replace(request, output_token_ids=delta.token_ids)
    assert retained.token_ids == request.prompt_token_ids + delta.token_ids
    assert (retained.num_computed_tokens, retained.num_cached_tokens) == (10, 0)
    assert retained.block_hashes == engine.block_hashes(request.prompt_token_ids)
    assert retained.first_token_logprob == delta.logprobs[0]
    assert (progress.num_computed_tokens, progress.block_ids) == (10, tuple(retained.lease.block_ids))
    assert not engine.has_work
    assert engine.load().kv_usage > 0
    engine.check_integrity()
    engine.release(retained.lease)
    assert engine.load().kv_usage == 0
    with pytest.raises(LeaseError):
        engine.release(retained.lease)


def test_progress_of_a_chunked_prompt(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=2)
    engine.admit(make_request(num_prompt=10), retain_kv=True)
    started: list[tuple[str, ...]] = []
    outputs = [engine.step(started.append) for _ in range(3)]
    progress = [output.progress[0] for output in outputs]
    assert [p.num_computed_tokens for p in progress] == [4, 8, 10]
    assert [p.scheduled_first for p in progress] == [True, False, False]
    assert len({p.block_ids for p in progress}) == 1, "all room is there from the start and does not move"
    assert started == [("r",)]
    assert [len(o.retained) for o in outputs] == [0, 0, 1]


@pytest.mark.parametrize("how", ["eos", "stop", "max_tokens"])
def test_a_first_token_that_ends_the_answer_is_not_handed_off(make_engine, make_request, model, how):
    first = expected_tokens(make_request(), model)[0]
    if how == "eos":
        model = replace(model, eos_token_ids=frozenset({first}))
    params = {"stop": {"stop_token_ids": (first,)}, "max_tokens": {"max_tokens": 1}}.get(how, {})
    engine = make_engine(model=model)
    engine.admit(make_request(**params), retain_kv=True)
    output = engine.step()
    assert output.retained == ()
    expected = FinishReason.LENGTH if how == "max_tokens" else FinishReason.STOP
    assert output.deltas[0].finish_reason is expected
    assert engine.load().kv_usage == 0


def test_a_retaining_request_is_not_preempted(make_engine, make_request, run):
    engine = make_engine(num_blocks=6, max_num_seqs=2, max_num_batched_tokens=4, enable_prefix_caching=False)
    engine.admit(make_request("grows", num_prompt=5, max_tokens=12))
    engine.step()
    engine.step()
    engine.admit(make_request("retains", num_prompt=16), retain_kv=True)
    outputs = [engine.step() for _ in range(4)]
    assert sum(output.num_preempted for output in outputs) == 1
    assert engine.load().num_waiting == 1, "the one that grows came first, and yet gave way"
    assert [p.num_computed_tokens for output in outputs for p in output.progress] == [3, 6, 9, 12]
    (retained,) = engine.step().retained
    assert not engine.step().made_progress
    engine.release(retained.lease)
    assert "grows" in run(engine)


def test_adopted_kv_goes_on_where_it_was(make_engine, make_request, model, run, clock):
    source, target = (
        memoryview(bytearray(16 * model.layout.block_bytes)),
        memoryview(bytearray(16 * model.layout.block_bytes)),
    )

    first, second = (Engine(FakeRunner(model, 16, memory), EngineConfig(), clock) for memory in (source, target))
    request = make_request(num_prompt=10, max_tokens=6)
    first.admit(request, retain_kv=True)
    (retained,) = first.step().retained
    lease = second.reserve("h", retained.num_computed_tokens, retained.block_hashes)
    size = model.layout.block_bytes
    for ours, theirs in zip(retained.lease.block_ids, lease.block_ids, strict=True):
        target[theirs * size : (theirs + 1) * size] = source[ours * size : (ours + 1) * size]
    second.adopt(replace(retained.request, request_id="h"), lease, retained.num_computed_tokens)
    deltas = run(second)["h"]
    assert tokens_of(deltas) == expected_tokens(request, model)[1:]
    assert deltas[0].first_index == 1
    assert deltas[0].num_cached_tokens == 0, "that KV came from elsewhere is not a prefix hit"
    again = second.reserve("h2", 10, retained.block_hashes)
    assert again.num_cached_tokens == 8, "what came from elsewhere is in the prefix cache too"
    assert second.reserve("h3", 8, retained.block_hashes).num_cached_tokens == 8


def test_adopt_refuses_what_does_not_fit_and_leaves_the_lease(make_engine, make_request):
    engine = make_engine(num_blocks=4)
    lease = engine.reserve("h", 6, ())
    request = make_request(output=(1,), max_tokens=5)
    for bad, num_computed in (
        (request, 7),
        (request, -1),
        (replace(request, prompt_token_ids=()), 6),
        (make_request(num_prompt=6, output=(1,), max_tokens=12), 6),
    ):
        with pytest.raises(InvalidRequest):
            engine.adopt(bad, lease, num_computed)
    engine.check_integrity()
    engine.adopt(request, lease, 6)
    with pytest.raises(LeaseError, match="not reserved"):
        engine.adopt(replace(request, request_id="other"), lease, 6)
    with pytest.raises(LeaseError, match="not lent out"):
        engine.release(lease)


def test_an_id_in_use_gets_no_room_and_runs_no_second_time(make_engine, make_request):
    engine = make_engine()
    engine.admit(make_request("runs"))
    reserved = engine.reserve("reserved", 6, ())
    engine.admit(make_request("kept"), retain_kv=True)
    (retained,) = engine.step().retained
    free = engine.load().kv_usage
    for taken in ("runs", "reserved", "kept"):
        with pytest.raises(InvalidRequest, match="must be new"):
            engine.reserve(taken, 6, ())
        with pytest.raises(InvalidRequest, match="must be new"):
            engine.admit(make_request(taken))
    assert engine.load().kv_usage == free
    for lease in (reserved, retained.lease):
        engine.release(lease)
        assert engine.reserve(lease.holder, 6, ()) is not None, "the id is free again"
    engine.check_integrity()


def test_a_hit_on_the_decode_side_is_not_the_clients(make_engine, make_request, run):
    engine = make_engine()
    engine.admit(make_request("before", num_prompt=8))
    run(engine)
    request = make_request("h", num_prompt=8, output=(1,))
    lease = engine.reserve("h", 8, engine.block_hashes(request.prompt_token_ids))
    assert lease.num_cached_tokens == 8
    engine.adopt(request, lease, 8)
    assert run(engine)["h"][0].num_cached_tokens == 0


def test_adopted_kv_that_is_preempted_before_its_first_step_is_still_found(make_engine, make_request):
    engine = make_engine(num_blocks=4)
    request = make_request("h", num_prompt=8, output=(1,), max_tokens=5)
    hashes = engine.block_hashes(request.prompt_token_ids)
    engine.adopt(request, engine.reserve("h", 8, hashes), 8)
    engine.abort("h")
    assert engine.reserve("again", 8, hashes).num_cached_tokens == 8


def test_an_answer_goes_on_by_recomputing(make_engine, make_request, run, model):
    request = make_request(max_tokens=6, temperature=1.0, seed=9)
    whole = expected_tokens(request, model)
    engine = make_engine()
    engine.admit(replace(request, output_token_ids=whole[:4]))
    deltas = run(engine)["r"]
    assert tokens_of(deltas) == whole[4:]
    assert deltas[0].first_index == 4


# What is refused


def test_a_request_that_can_never_fit_is_refused_with_the_numbers(make_engine, make_request):
    engine = make_engine(num_blocks=4)
    with pytest.raises(InvalidRequest, match=r"10 tokens, max_tokens 8.*needs 5 KV blocks of 4 tokens, the pool has 4"):
        engine.admit(make_request(num_prompt=10, max_tokens=8))
    engine.admit(make_request(num_prompt=10, max_tokens=7))
    engine.admit(make_request("kv", num_prompt=16, max_tokens=8), retain_kv=True)
    with pytest.raises(InvalidRequest, match="needs 5 KV blocks"):
        engine.admit(make_request("kv2", num_prompt=17), retain_kv=True)
    with pytest.raises(InvalidRequest, match=r"num_tokens: got 17, needs 5"):
        engine.reserve("h", 17, ())
    with pytest.raises(InvalidRequest, match="num_tokens: got 0"):
        engine.reserve("h", 0, ())


def test_a_request_that_exactly_fits_the_pool_ends(make_engine, make_request, run, model):
    engine = make_engine(num_blocks=4)
    request = make_request(num_prompt=10, max_tokens=7)
    engine.admit(request)
    assert tokens_of(run(engine)["r"]) == expected_tokens(request, model)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"prompt_token_ids": ()}, "prompt"),
        ({"prompt_token_ids": (31,)}, "prompt_token_ids"),
        ({"output_token_ids": (31,)}, "output_token_ids"),
        ({"output_token_ids": (1,) * 5}, "output_token_ids"),
        ({"prompt_token_ids": (1,) * 64}, "prompt"),
        ({"prompt_token_ids": (1,) * 60}, "max_tokens"),
    ],
)
def test_malformed_requests_are_refused_by_field(make_engine, make_request, change, field):
    engine = make_engine()
    with pytest.raises(InvalidRequest) as refused:
        engine.admit(replace(make_request(), **change))
    assert refused.value.field == field
    assert not engine.has_work


def test_an_id_in_use_is_refused(make_engine, make_request):
    engine = make_engine()
    engine.admit(make_request())
    with pytest.raises(InvalidRequest, match="request_id"):
        engine.admit(make_request())


def test_the_queue_is_bounded(make_engine, make_request):
    engine = make_engine(max_waiting=2)
    engine.admit(make_request("a"))
    engine.admit(make_request("b"))
    with pytest.raises(Overloaded, match="2 requests wait, the queue takes 2"):
        engine.admit(make_request("c"))
    engine.step()
    engine.admit(make_request("c"))


def test_no_room_is_none_and_changes_nothing(make_engine):
    engine = make_engine(num_blocks=4)
    lease = engine.reserve("a", 12, ())
    assert engine.reserve("b", 8, ()) is None
    engine.release(lease)
    assert engine.reserve("b", 8, ()) is not None


# Aborts and deadlines


def test_abort_frees_at_once(make_engine, make_request):
    engine = make_engine(max_num_seqs=1)
    engine.admit(make_request("runs"))
    engine.admit(make_request("waits"))
    engine.step()
    assert engine.abort("runs")
    assert engine.abort("waits")
    assert not engine.abort("runs")
    assert not engine.has_work
    assert engine.load().kv_usage == 0
    engine.check_integrity()


async def test_a_passed_deadline_is_an_error_delta(make_engine, make_request, clock):
    engine = make_engine(max_num_seqs=1)
    engine.admit(make_request("runs", deadline_s=2.0))
    engine.admit(make_request("waits", deadline_s=1.0))
    engine.admit(make_request("stays", deadline_s=9.0))
    engine.admit(make_request("gone", deadline_s=0.5))
    engine.abort("gone")
    assert engine.next_deadline_s() == 1.0
    engine.step()
    await clock.advance(2.0)
    deltas = {d.request_id: d for d in engine.step().deltas}
    for request_id, num_tokens in (("runs", 1), ("waits", 0)):
        delta = deltas[request_id]
        assert (delta.finish_reason, delta.first_index) == (FinishReason.ERROR, num_tokens)
        assert delta.error.code is ErrorCode.DEADLINE_EXCEEDED
        assert not delta.error.retryable
        assert delta.stages is not None
    assert engine.load().num_running == 1
    assert engine.next_deadline_s() == 9.0


# What is reported


def test_cached_tokens_are_prefix_hits_and_the_last_token_is_computed(make_engine, make_request, run):
    engine = make_engine()
    for request_id, cached in (("cold", 0), ("warm", 4)):
        engine.admit(make_request(request_id, num_prompt=8))
        deltas = run(engine)[request_id]
        assert [d.num_cached_tokens for d in deltas] == [cached, 0, 0, 0, 0]
    assert engine.stats().num_prefix_hit_tokens == 4


def test_cached_tokens_never_count_output(make_engine, make_request, run, model):
    request = make_request(num_prompt=6, max_tokens=9)
    whole = expected_tokens(request, model)
    engine = make_engine()
    engine.admit(request)
    run(engine)
    engine.admit(replace(request, request_id="on", output_token_ids=whole[:7]))
    assert run(engine)["on"][0].num_cached_tokens == 6


def test_without_prefix_caching_nothing_is_cached(make_engine, make_request, run):
    engine = make_engine(enable_prefix_caching=False)
    for request_id in ("a", "b"):
        engine.admit(make_request(request_id, num_prompt=8))
        assert run(engine)[request_id][0].num_cached_tokens == 0


@pytest.mark.parametrize("budget", [3, 100])
def test_prompt_logprobs_come_whole_with_the_first_delta(make_engine, make_request, run, budget):
    engine = make_engine(max_num_batched_tokens=budget, max_num_seqs=2)
    engine.admit(make_request("warm", num_prompt=9))
    run(engine)
    engine.admit(make_request(num_prompt=9, prompt_logprobs=1, logprobs=2))
    first, *rest = run(engine)["r"]
    assert [p and p.token_id for p in first.prompt_logprobs] == [None, *range(2, 10)]
    assert first.num_cached_tokens == 0
    assert all(d.prompt_logprobs == () for d in rest)
    assert all(d.logprobs[0].token_id == d.token_ids[0] for d in [first, *rest])


def test_prompt_logprobs_of_a_prompt_preempted_half_way_come_once(make_engine, make_request, model):
    engine = make_engine(num_blocks=4, max_num_batched_tokens=3, max_num_seqs=2)
    engine.admit(make_request("grows", num_prompt=2, max_tokens=9))
    engine.step()
    engine.admit(make_request(num_prompt=12, max_tokens=1, prompt_logprobs=0))
    num_preempted, deltas = 0, []
    while engine.has_work:
        output = engine.step()
        num_preempted += output.num_preempted
        deltas += [d for d in output.deltas if d.request_id == "r"]
    assert num_preempted == 1
    assert [p and p.token_id for p in deltas[0].prompt_logprobs] == [None, *range(2, 13)]


async def test_stages_of_a_request_that_waited(make_engine, make_request, clock):
    class Slow(FakeRunner):
        def execute(self, batch):
            clock._now += 0.25  # the virtual clock may only be moved by a task otherwise
            return super().execute(batch)

    engine = Engine(Slow(FakeModel(), 16), EngineConfig(), clock)
    engine.admit(make_request("r", num_prompt=6, max_tokens=2))
    await clock.advance(3.0)
    output = engine.step()
    assert (output.step_s, output.runner_s) == (0.25, 0.25)
    assert output.deltas[0].stages == StageTimes(prefill_queue_s=3.0, prefill_compute_s=0.25)
    await clock.advance(0.5)
    output = engine.step()
    assert output.deltas[0].stages == StageTimes(decode_queue_s=0.5, first_step_s=0.25)
    assert output.ended == (EngineSample("length", False, 6, 0, 2, 2, 3.0, 0.25, 0.75),)

    lease = engine.reserve("h", 6, engine.block_hashes(range(1, 7)))
    engine.adopt(make_request("h", num_prompt=6, output=(1,), max_tokens=3), lease, 0, arrived_s=clock.now() - 0.5)
    await clock.advance(1.0)
    output = engine.step()
    assert output.deltas[0].stages == StageTimes(decode_queue_s=1.5, first_step_s=0.25)
    output = engine.step()
    assert output.deltas[0].stages is None
    assert output.ended == (EngineSample("length", True, 6, 0, 2, 3, 1.5, None, 0.5),)


async def test_what_came_during_a_step_has_waited_since_then(make_engine, make_request, clock):
    engine = make_engine()
    await clock.advance(3.0)
    engine.admit(make_request("r", num_prompt=6, max_tokens=1), arrived_s=clock.now() - 2.0)
    (first,) = engine.step().deltas
    assert first.stages.prefill_queue_s == 2.0


def test_load_counts_requests_tokens_and_blocks(make_engine, make_request):
    engine = make_engine(max_num_seqs=1)
    engine.admit(make_request("a", num_prompt=6))
    engine.admit(make_request("b", num_prompt=7))
    engine.step()
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_queued_tokens) == (1, 1, 8)
    assert load.kv_usage == pytest.approx(2 / 16)


def test_a_step_without_anything_to_do_says_so(make_engine):
    assert not make_engine().step().made_progress
    assert not StepOutput().made_progress


# Faults of ours are loud


@pytest.mark.parametrize("retain_kv", [False, True])
def test_a_token_that_cannot_be_sampled_ends_its_request_alone(make_request, run, model, clock, retain_kv):
    class Broken(FakeRunner):
        def execute(self, batch):
            results = super().execute(batch)
            pairs = zip(batch.requests, results, strict=True)
            return tuple(SampledToken(None, fault="broken") if r.request_id == "bad" else s for r, s in pairs)

    engine = Engine(Broken(model, 16), EngineConfig(), clock)
    engine.admit(make_request("bad"), retain_kv=retain_kv)
    engine.admit(make_request("good"))
    reasons, step = [], engine.step

    def told():
        output = step()
        reasons.extend(sample.reason for sample in output.ended)
        return output

    engine.step = told
    deltas = run(engine)
    assert tokens_of(deltas["good"]) == expected_tokens(make_request("good"), model)
    (last,) = deltas["bad"]
    assert (last.finish_reason, last.token_ids) == (FinishReason.ERROR, ())
    assert (last.error.code, last.error.message) == (ErrorCode.INTERNAL, "broken")
    assert engine.load().kv_usage == 0.0
    assert reasons == ["error", "length"], "each that leaves is told once"


def test_a_runner_that_answers_what_it_was_not_asked_is_an_error(make_request, model, clock):
    class Liar(FakeRunner):
        def execute(self, batch):
            return tuple(SampledToken(None) for _ in batch.requests)

    engine = Engine(Liar(model, 16), EngineConfig(), clock)
    engine.admit(make_request())
    with pytest.raises(RuntimeError, match="does not match what was scheduled"):
        engine.step()


def test_an_engine_that_cannot_go_on_says_so(make_engine, make_request):
    engine = make_engine(num_blocks=4)
    engine._kv.lease("leaked", 16, (), 0)  # a bug, put there by hand: a lease without an owner
    engine.admit(make_request())
    with pytest.raises(EngineStuck):
        engine.step()
    with pytest.raises(LeaseError, match="1 leases live, 0 have an owner"):
        engine.check_integrity()


def test_a_waiting_request_has_no_blocks(make_request):

    with pytest.raises(RuntimeError, match="holds no blocks"):
        _ = Request(make_request(), 0.0, (0, 1)).lease
