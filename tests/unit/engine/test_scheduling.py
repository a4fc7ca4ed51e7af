"""What one step takes: budget, chunks, order, and who gives way."""

import pytest

from contracts.errors import ConfigError
from engine.config import SchedulerConfig
from engine.execution.fake import expected_tokens


@pytest.mark.parametrize(
    ("limits", "field"),
    [
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_waiting": 0}, "max_waiting"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 7}, "max_num_batched_tokens"),
        ({"policy": "random"}, "policy"),
    ],
)
def test_limits_that_cannot_work_are_refused_by_name(limits, field):
    with pytest.raises(ConfigError, match=f"^{field}: got"):
        SchedulerConfig(**limits)


def test_a_long_prompt_is_computed_in_chunks_beside_decodes(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=2)
    engine.admit(make_request("short", num_prompt=3))
    assert engine.step().num_scheduled_tokens == 3
    engine.admit(make_request("long", num_prompt=8))
    seen = []
    for _ in range(3):
        output = engine.step()
        seen.append((output.num_scheduled_tokens, [d.request_id for d in output.deltas]))
    assert seen == [(4, ["short"]), (4, ["short"]), (3, ["short", "long"])]


def test_a_full_step_leaves_the_next_prompt_waiting(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4)
    engine.admit(make_request("a", num_prompt=4))
    engine.admit(make_request("b", num_prompt=4))
    engine.step()
    assert (engine.load().num_running, engine.load().num_waiting) == (1, 1)


def test_a_later_chunk_waits_when_the_budget_is_spent(make_engine, make_request):
    engine = make_engine(max_num_batched_tokens=4, max_num_seqs=4, enable_prefix_caching=False)
    for request_id in ("a", "b"):
        engine.admit(make_request(request_id, num_prompt=7))
    steps = [
        (output.num_scheduled_tokens, [d.request_id for d in output.deltas])
        for output in (engine.step() for _ in range(5))
    ]
    # a: 4, then 3 and b: 1; then a decodes while b gets 3 more at a time
    assert steps == [(4, []), (4, ["a"]), (4, ["a"]), (4, ["a", "b"]), (2, ["a", "b"])]


def test_priority_runs_first_and_is_preempted_last(make_engine, make_request, model):
    engine = make_engine(num_blocks=5, max_num_seqs=2, max_num_batched_tokens=32, policy="priority")
    low = make_request("low", num_prompt=8, max_tokens=8, priority=5)
    high = make_request("high", num_prompt=8, max_tokens=8, priority=-1)
    engine.admit(low)
    engine.admit(high)
    outputs: dict[str, list[int]] = {}
    ended = []
    while engine.has_work:
        for delta in engine.step().deltas:
            outputs.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish_reason:
                ended.append(delta.request_id)
    assert ended == ["high", "low"]
    assert engine.stats().num_preemptions > 0
    for request in (low, high):
        assert tuple(outputs[request.request_id]) == expected_tokens(request, model)


def test_preemption_changes_no_answer(make_engine, make_request, run, model):
    engine = make_engine(num_blocks=6, max_num_seqs=4, max_num_batched_tokens=16)
    requests = [make_request(f"r{i}", num_prompt=5 + i, max_tokens=10, temperature=1.0, seed=i) for i in range(4)]
    for request in requests:
        engine.admit(request)
    deltas = run(engine)
    assert engine.stats().num_preemptions > 0
    for request in requests:
        tokens = tuple(t for d in deltas[request.request_id] for t in d.token_ids)
        assert tokens == expected_tokens(request, model)


def test_a_reservation_leaves_the_first_waiting_request_its_room(make_engine, make_request):
    engine = make_engine(num_blocks=8, max_num_seqs=4)
    held = engine.reserve("h1", 16, ())
    engine.admit(make_request(num_prompt=20))
    assert engine.step().num_scheduled_tokens == 0
    assert engine.reserve("h2", 4, ()) is None, "4 of 8 blocks are free, and the request that waits needs 5"
    engine.release(held)
    assert engine.reserve("h2", 4, ()) is not None
    assert engine.step().num_scheduled_tokens == 20


def test_a_reservation_leaves_the_first_waiting_request_its_slot(make_engine, make_request):
    engine = make_engine(max_num_seqs=1)
    engine.admit(make_request("a"))
    engine.step()
    engine.admit(make_request("b"))
    assert engine.reserve("h", 4, ()) is None
    engine.abort("b")
    assert engine.reserve("h", 4, ()) is not None
