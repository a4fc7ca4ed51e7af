"""The hand-off keeps its promises in every state that small worlds can reach, and each rule of it is needed.

The worlds and the promises: `world.py`. A run prints how many states it walked (`pytest -s`); a broken promise is printed as
the shortest way to it.
"""

from dataclasses import replace
from functools import cache

import pytest

from kv_transfer.handoff import SOURCE_TABLE, TARGET_TABLE, SourceAction, SourceState, TargetAction, TargetState
from tests.model.explorer import Model, explore
from tests.model.world import Answer, Bounds, Promise, Rules, source_rows, target_rows

S, SA, T, TA = SourceState, SourceAction, TargetState, TargetAction

ONE = Bounds(prefill_lives=2, decode_lives=2)
CONTENDING = Bounds(hands=2, need=2, prefill_lives=2)  # room for one at a time: blocks change hands
SIDE_BY_SIDE = Bounds(hands=2, need=1)
FORGETFUL = Bounds(need=1, prefill_lives=2, grants=2)  # more ended since than can be remembered
DAMAGING = Bounds(need=1, decode_lives=2, damage=True)
CHAINED = Bounds(hands=2, need=1, chained=True)
WORLDS = {
    "one hand-off, both workers start again": ONE,
    "two hand-offs, room for one, prefill starts again": CONTENDING,
    "two hand-offs, room for one, decode starts again": Bounds(hands=2, need=2, decode_lives=2),
    "two hand-offs side by side": SIDE_BY_SIDE,
    "one hand-off, forgotten and asked for again": FORGETFUL,
    "one hand-off, bytes that change": DAMAGING,
    "one request, aimed at two targets": CHAINED,
}


@cache
def walk(name):
    model = Model(Rules(), WORLDS[name])
    return explore(model), model


def explored(bounds):
    model = Model(Rules(), bounds)
    return explore(model), model


@pytest.mark.parametrize("name", WORLDS)
def test_every_promise_holds_in_every_state(name):
    found, _ = walk(name)
    print(f"{name}: {found.num_states} states, {found.num_moves} moves")
    assert found.broken is None, found.story()


def test_the_walk_sees_every_row_that_does_something():
    walked = set().union(*(walk(name)[1].walked for name in WORLDS))
    rows = [*SOURCE_TABLE.items(), *TARGET_TABLE.items()]
    assert [pair for pair, (after, actions) in rows if (actions or after != pair[0]) and pair not in walked] == []


def test_the_walk_sees_every_way_that_two_sides_may_answer():
    answers = set().union(*(walk(name)[0].answers for name, bounds in WORLDS.items() if bounds.grants == 1))
    for pair in ((Answer.TOKENS, Answer.TOKENS), (Answer.ERROR, Answer.ERROR), (Answer.ERROR, Answer.NONE)):
        assert pair in answers
    assert (Answer.ERROR, Answer.TOKENS) in answers  # the acknowledgement was lost: the router reads one of the two
    assert (Answer.TOKENS, Answer.ERROR) not in answers


@pytest.mark.parametrize("state", [T.RESERVED, T.RECEIVING, T.DRAINING])
def test_the_walk_sees_a_writer_inside(state):
    """It may stay there for ever: whatever else happens, the blocks are not freed before it has left."""
    _, model = walk("one hand-off, both workers start again")
    assert any(hand.target is state and hand.inside for hand in model.hands)


def test_the_walk_sees_damage_that_is_found():
    """And never one that is not: see the promise INTACT. What was found is refused, and the client's answer comes otherwise."""
    _, model = walk("one hand-off, bytes that change")
    found = [hand for hand in model.hands if hand.bad and hand.judged and hand.target is T.RELEASED]
    assert {(hand.damaged, hand.stale) for hand in found} == {(True, False), (False, True), (True, True)}
    assert {hand.target_said for hand in found} == {Answer.ERROR}


def test_the_walk_sees_another_push_after_damage_and_outcomes_that_cross_with_another_target():
    found, model = explored(replace(CHAINED, damage=True, blocks=1))
    print(f"{found.num_states} states")
    assert found.broken is None, found.story()
    worlds = [model.look(state) for state in found.states]
    assert any(h[0].damaged and h[1].source_said is Answer.TOKENS for _, h in worlds), "the next push went well"
    crossed = [s for s, h in worlds if s.heard is Answer.ERROR]
    assert crossed, "the first target was taken over when the router aimed at the second"
    assert {shared.num_taken for shared, _ in worlds} == {0, 1}


def test_the_model_walks_the_tables_of_the_product():
    rules = Rules()
    assert rules.source is SOURCE_TABLE
    assert rules.target is TARGET_TABLE


DRAINING, RELEASED_AT_ONCE = (T.DRAINING, ()), (T.RELEASED, (TA.CLOSE_WINDOWS, TA.RELEASE))
MUTATIONS = {
    # The decode side's table
    "an abort while receiving releases at once": (
        Rules(target=target_rows(RECEIVING__ABORTED=(T.RELEASED, (TA.RELEASE,)))),
        Promise.FENCED,
    ),
    "an abort while reserved releases at once": (
        Rules(target=target_rows(RESERVED__ABORTED=RELEASED_AT_ONCE)),
        Promise.FENCED,
    ),
    "a lease that runs out is released at once": (
        Rules(target=target_rows(RESERVED__EXPIRED=RELEASED_AT_ONCE)),
        Promise.FENCED,
    ),
    "a new life of prefill releases at once": (
        Rules(target=target_rows(RESERVED__PEER_RESTARTED=RELEASED_AT_ONCE)),
        Promise.FENCED,
    ),
    "adopted at the commit, without quiescence": (
        Rules(target=target_rows(RESERVED__COMMIT=(T.ADOPTED, (TA.CLOSE_WINDOWS, TA.ADOPT)))),
        Promise.FENCED,
    ),
    "a lease that runs out closes no window": (Rules(target=target_rows(RESERVED__EXPIRED=DRAINING)), Promise.FREED),
    "a lease is released twice": (
        Rules(target=target_rows(RELEASED__QUIESCED=(T.RELEASED, (TA.RELEASE,)))),
        Promise.ONE_OWNER,
    ),
    "what was adopted is released, too": (
        Rules(target=target_rows(ADOPTED__QUIESCED=(T.RELEASED, (TA.RELEASE,)))),
        Promise.ONE_ANSWER,
    ),
    "an abort is ignored while reserved": (
        Rules(target=target_rows(RESERVED__ABORTED=(T.RESERVED, ()))),
        Promise.GIVEN_UP,
    ),
    "an abort is ignored while receiving": (
        Rules(target=target_rows(RECEIVING__ABORTED=(T.RECEIVING, ()))),
        Promise.GIVEN_UP,
    ),
    "a commit revives what drains": (
        Rules(target=target_rows(DRAINING__COMMIT=(T.RECEIVING, ()))),
        Promise.GIVEN_UP,
    ),
    "a late commit adopts what was released": (
        Rules(target=target_rows(RELEASED__COMMIT=(T.RECEIVING, ()))),
        Promise.GIVEN_UP,
    ),
    "bad bytes are adopted": (
        Rules(target=target_rows(RECEIVING__REFUSED=(T.ADOPTED, (TA.ADOPT,)))),
        Promise.GIVEN_UP,
    ),
    "a new life of prefill is no news": (
        Rules(target=target_rows(RESERVED__PEER_RESTARTED=(T.RESERVED, ()))),
        Promise.STALE,
    ),
    "draining never ends": (Rules(target=target_rows(DRAINING__QUIESCED=DRAINING)), Promise.FREED),
    # The prefill side's table
    "an abort gives the source blocks back at once": (
        Rules(source=source_rows(SENDING__ABORTED=(S.RELEASED, (SA.TELL_PEER, SA.GIVE_BACK)))),
        Promise.SOURCE_READ,
    ),
    "an abort is ignored while sending": (
        Rules(source=source_rows(SENDING__ABORTED=(S.SENDING, ()))),
        Promise.GIVEN_UP,
    ),
    "a late grant begins to send again": (
        Rules(source=source_rows(RELEASED__GRANTED=(S.SENDING, (SA.SEND,)))),
        Promise.ONE_OWNER,
    ),
    "a failure keeps the source blocks": (
        Rules(source=source_rows(COMPUTING__FAILED=(S.RELEASED, (SA.TELL_PEER,)))),
        Promise.FREED,
    ),
    # When events happen
    "no lease runs out": (Rules(leases_end=False), Promise.FREED),
    "prefill waits for ever": (Rules(gives_up=False), Promise.FREED),
    "committed before the last write": (Rules(commits_after_last_write=False), Promise.WRITTEN),
    "source blocks are free before the acknowledgement": (Rules(waits_for_acknowledgement=False), Promise.NO_LIE),
    "prefill does not wait for its own write": (Rules(waits_for_own_write=False), Promise.SOURCE_READ),
    "released while not quiesced": (Rules(waits_for_writers=False), Promise.FENCED),
    "a closed window is no fence": (Rules(windows_fence=False), Promise.FENCED),
    "stale epochs are obeyed": (Rules(refuses_stale_lives=False), Promise.STALE),
    "older lives are left alone": (Rules(ends_older_lives=False), Promise.STALE),
    "grants without a second look": (Rules(looks_again_after_asking=False), Promise.STALE),
    "a ticket redeems any grant": (Rules(ticket_names_its_grant=False), Promise.WRITTEN),
    "room again for what runs": (Rules(refuses_what_runs=False), Promise.ONE_ANSWER),
    "a worker is obeyed to which the hand-off does not belong": (Rules(knows_its_owner=False), Promise.OWNED),
    # Integrity
    "adopted without a comparison": (Rules(compares=False), Promise.INTACT),
    "compared while it can still be written": (Rules(compares_when_quiesced=False), Promise.INTACT),
    "compared after it is adopted": (
        Rules(
            target=target_rows(RESERVED__COMMIT=(T.ADOPTED, (TA.CLOSE_WINDOWS, TA.ADOPT)), ADOPTED__REFUSED=DRAINING)
        ),
        Promise.INTACT,
    ),
    "a spoiled block stays in the prefix cache": (Rules(forgets_spoiled=False), Promise.FORGOTTEN),
    # Another target
    "the next target is begun at once": (Rules(next_waits_for_its_turn=False), Promise.ONCE),
    "the outcome of an older target is taken for the new one's": (
        Rules(outcomes_name_their_handoff=False),
        Promise.NO_LIE,
    ),
    "what another target has replaced goes on": (
        Rules(source=source_rows(SENDING__ABORTED=(S.SENDING, ()), COMPUTING__ABORTED=(S.COMPUTING, ()))),
        Promise.GIVEN_UP,
    ),
    "the pool gives a block to two": (Rules(gives_free_blocks=False), Promise.ONE_OWNER),
}
WHERE = {
    "the pool gives a block to two": CONTENDING,
    "a ticket redeems any grant": FORGETFUL,
    "room again for what runs": FORGETFUL,
    "adopted without a comparison": DAMAGING,
    "compared while it can still be written": DAMAGING,
    "compared after it is adopted": DAMAGING,
    "a spoiled block stays in the prefix cache": DAMAGING,
    "the next target is begun at once": CHAINED,
    "the outcome of an older target is taken for the new one's": CHAINED,
    "what another target has replaced goes on": CHAINED,
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_rule_is_needed(name):
    rules, promise = MUTATIONS[name]
    found = explore(Model(rules, WHERE.get(name, ONE)))
    print(found.story())
    assert found.broken is promise, found.story()
    assert found.trace


def test_a_counterexample_can_be_read():
    rules = Rules(target=target_rows(RESERVED__ABORTED=RELEASED_AT_ONCE))
    trace = "\n".join(explore(Model(rules, replace(ONE, decode_lives=1))).trace)
    assert "prefill begins and sends Reserve" in trace
    assert "writer inside" in trace
    assert trace.endswith(Promise.FENCED)
