"""What the real sender and receiver do is a way of the model: their steps are recorded under random faults and replayed."""

import asyncio
import random
from dataclasses import replace

import pytest

from kv_transfer.handoff import SourceEvent, SourceState, SourceStep, TargetEvent, TargetState
from kv_transfer.local import Delivery, WriteFault
from tests.model.explorer import Model
from tests.model.replay import Replays
from tests.model.world import Bounds, Rules
from tests.property.test_handoff import BLOCK, FATES, NUM_SENDERS, play

NUM_PLAYS = 200
MAX_LIVES = 3  # of the prefill worker in one play
BOUNDS = Bounds(blocks=1, need=1, prefill_lives=MAX_LIVES)


def random_fault(draw):
    return WriteFault(
        delivery=draw.choice([*[Delivery.DELIVER] * 6, Delivery.FAIL, Delivery.DROP]),
        delay_s=draw.choice([0.0, 0.0, 0.0, 0.5, 5.0]),
        stall_s=draw.choice([0.0, 0.0, 1.0, 12.0]),
        landed_bytes=draw.choice([0, 5, BLOCK]),
    )


def random_operation(draw):
    name = draw.choice(
        [*["go", "finish", "tick"] * 3, "turns", "retarget", "abort", "stray_abort", "stranger_abort", "cancel"]
    )
    if name == "tick":
        return name, draw.choice([0.0, 0.05, 0.5, 1.0, 4.0])
    return name, draw.randint(1, 5) if name == "turns" else draw.randrange(NUM_SENDERS)


def record(seed):
    """The steps of each hand-off of one random play, in order: {hand-off id: [step, …]}."""
    draw = random.Random(seed)
    traces = {}
    operations = [random_operation(draw) for _ in range(draw.randint(5, 30))]
    for _ in range(draw.randint(0, MAX_LIVES - 1)):
        operations.insert(draw.randrange(len(operations)), ("new_life",))
    fates = [draw.choice(FATES) for _ in range(draw.randint(0, 30))]
    faults = [random_fault(draw) for _ in range(draw.randint(0, 20))]
    asyncio.run(play(operations, fates, faults, lambda step: traces.setdefault(step.handoff_id, []).append(step)))
    return traces


@pytest.fixture(scope="module")
def recorded():
    return [trace for seed in range(NUM_PLAYS) for trace in record(seed).values()]


@pytest.fixture(scope="module")
def replays():
    return Replays(Model(Rules(), BOUNDS))


def refused_at(replays, trace):
    """Why the model has no way that looks like `trace`; None when it has one."""
    states = replays.start
    for number, step in enumerate(trace):
        states = replays.hear(states, step)
        if not states:
            return f"step {number}, the last of:\n" + "\n".join(str(one) for one in trace[: number + 1])
    return None if replays.may_be_settled(states) else f"its end:\n{trace}"


def test_every_recorded_handoff_is_a_way_of_the_model(recorded, replays):
    for trace in recorded:
        assert refused_at(replays, trace) is None
    print(
        f"{len(recorded)} hand-offs, {sum(map(len, recorded))} steps, {len(set(map(outline, recorded)))} different ways"
    )


def outline(trace):
    return tuple((step.before, step.event, step.after) for step in trace)


def test_the_recorded_ones_take_most_ways(recorded):
    walked = {(step.before, step.event) for trace in recorded for step in trace}
    assert len(set(map(outline, recorded))) >= 20
    assert {state for state, _ in walked} >= {*SourceState, *TargetState} - {
        SourceState.RELEASED,
        TargetState.RELEASED,
        TargetState.ADOPTED,
    }
    assert {event for _, event in walked} >= {*SourceEvent, *TargetEvent} - {TargetEvent.REFUSED}


def test_targets_that_change_are_among_them():
    went_well = 0
    for seed in range(NUM_PLAYS):
        traces = record(seed)
        committed = {name for name, trace in traces.items() if any(s.event is SourceEvent.COMMITTED for s in trace)}
        assert len({name.split(".")[0] for name in committed}) == len(committed), "handed over twice"
        went_well += sum("." in name for name in committed)
    assert went_well >= 10


def adopted(recorded):
    """A hand-off that went well, from both sides."""
    good = (SourceEvent.GRANTED, TargetEvent.COMMIT, TargetEvent.VERIFIED, SourceEvent.COMMITTED)
    return next(trace for trace in recorded if tuple(step.event for step in trace) == good)


def test_a_lie_is_refused(recorded, replays):
    granted, commit, verified, committed = adopted(recorded)
    assert refused_at(replays, [granted, commit, verified, committed]) is None
    for lie in (
        [granted, commit, committed, verified],  # acknowledged before it was adopted
        [commit, verified, granted, committed],  # written before there was room
        [granted, commit, verified, committed, verified],  # adopted twice
        [granted, commit, replace(verified, after=TargetState.RELEASED), committed],
        [granted, commit, replace(verified, actions=()), committed],
        [granted, commit, verified],  # prefill never answers
    ):
        assert refused_at(replays, lie) is not None


def test_blocks_freed_before_quiescence_are_refused(recorded, replays):
    trace = next(t for t in recorded if any(step.event is SourceEvent.QUIESCED for step in t))
    place = next(at for at, step in enumerate(trace) if step.event is SourceEvent.QUIESCED)
    early = [step for step in trace if step is not trace[place]]
    assert isinstance(trace[place], SourceStep)
    assert refused_at(replays, early) is not None
