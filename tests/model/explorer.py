"""Walks every state that a modelled world can reach, and holds each against the promises.

    explore(Model(rules, bounds)) ──▶ Explored: how many states, and the shortest way to a broken promise

A state is a tuple of numbers: one for what is shared, one for each hand-off; what may happen to a hand-off is worked out once
for each pair of its number and the shared one's. Two questions are asked: is a state or a step wrong in itself, and does every
way of *promised* steps (those that need no message and no luck) end, with all blocks free and everybody answered?
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from kv_transfer.handoff import SourceState, TargetState
from tests.model.decode_side import LEASED, DecodeSide
from tests.model.prefill_side import PrefillSide
from tests.model.world import (
    Answer,
    Before,
    Bounds,
    Hand,
    Observation,
    Promise,
    Rules,
    Shared,
    Step,
    Window,
    Writing,
)

T = TypeVar("T", bound=Hashable)
State = tuple[int, ...]  # number of what is shared, then of each hand-off


class Numbers(Generic[T]):
    """Values and their numbers."""

    def __init__(self) -> None:
        self._numbers: dict[T, int] = {}
        self.values: list[T] = []

    def of(self, value: T) -> int:
        number = self._numbers.setdefault(value, len(self.values))
        if number == len(self.values):
            self.values.append(value)
        return number


class Move(NamedTuple):
    """A step of a whole world."""

    text: str
    after: State
    promised: bool
    seen: tuple[tuple[int, Observation], ...]  # which hand-off, and what its table did
    broken: Promise | None


class Model:
    """A world of `bounds` under `rules`, as a graph."""

    def __init__(self, rules: Rules, bounds: Bounds) -> None:
        self.bounds = bounds
        self._rules = rules
        self._prefill = PrefillSide(rules, bounds)
        self._decode = DecodeSide(rules, bounds)
        self._shared: Numbers[Shared] = Numbers()
        self._hands: Numbers[Hand] = Numbers()
        self._local: dict[tuple[int, int], list[tuple[Step, int, int]]] = {}
        self._verdicts: dict[tuple[int, int], Promise | None] = {}
        self.walked: set[tuple[SourceState | TargetState, str]] = set()  # rows of the tables

    @property
    def start(self) -> State:
        shared = self._shared.of(Shared(prefill=1, decode=1, known=0, free=self.bounds.all_free))
        places = range(self.bounds.hands)
        return (shared, *(self._hands.of(Hand(place=place if self.bounds.chained else 0)) for place in places))

    @property
    def hands(self) -> list[Hand]:
        """Every hand-off, as it was in some state that has been looked at."""
        return self._hands.values

    def look(self, state: State) -> tuple[Shared, list[Hand]]:
        """What the numbers stand for."""
        return self._shared.values[state[0]], [self._hands.values[number] for number in state[1:]]

    def moves(self, state: State) -> Iterator[Move]:
        """Everything that may happen next."""
        for place, number in enumerate(state[1:], 1):
            for step, shared, hand in self._steps(state[0], number):
                after = (shared, *state[1:place], hand, *state[place + 1 :])
                seen = () if step.seen is None else ((place - 1, step.seen),)
                yield Move(f"h{place - 1}: {step.text}", after, step.promised, seen, step.broken)
        yield from self._workers(state)

    def wrong(self, state: State) -> Promise | None:
        """The promise that this state breaks by itself."""
        shared, hands = self.look(state)
        for number, hand in zip(state[1:], hands, strict=True):
            pair = state[0], number
            if pair not in self._verdicts:
                self._verdicts[pair] = wrong_hand(hand, shared)
            if self._verdicts[pair] is not None:
                return self._verdicts[pair]
        counted = shared.free.bit_count() + sum(hand.blocks.bit_count() for hand in hands)
        return Promise.ONE_OWNER if counted != self.bounds.blocks else None

    def unsettled(self, state: State) -> Promise | None:
        """What is missing in a state where nothing promised is left to happen."""
        shared, hands = self.look(state)
        if shared.free != self.bounds.all_free or any(hand.held for hand in hands):
            return Promise.FREED
        for hand in hands:
            must = (hand.source is not None, hand.source_said), (isinstance(hand.target, TargetState), hand.target_said)
            if any(owed and said is Answer.NONE for owed, said in must):
                return Promise.ONE_ANSWER
        return None

    def _steps(self, shared: int, hand: int) -> list[tuple[Step, int, int]]:
        found = self._local.get((shared, hand))
        if found is None:
            now = self._hands.values[hand], self._shared.values[shared]
            steps = (*self._prefill.steps(*now), *self._decode.steps(*now))
            found = [(step, self._shared.of(step.shared), self._hands.of(step.hand)) for step in steps]
            self._local[shared, hand] = found
            self.walked.update((step.seen.before, step.seen.event) for step in steps if step.seen)
        return found

    def _workers(self, state: State) -> Iterator[Move]:
        """What happens to a worker as a whole: it starts again, or decode hears from a new life of prefill."""
        shared, hands = self.look(state)
        if shared.prefill < self.bounds.prefill_lives:
            again = self._state(shared._replace(prefill=shared.prefill + 1), hands)
            yield Move(f"prefill starts again: epoch {shared.prefill + 1}", again, False, (), None)
        if shared.decode < self.bounds.decode_lives:
            fresh = shared._replace(decode=shared.decode + 1, known=0, free=self.bounds.all_free, spoiled=False)
            again = self._state(fresh, [forgotten(hand) for hand in hands])
            yield Move(f"decode starts again: epoch {fresh.decode}", again, False, (), None)
        for life in range(shared.known + 1, shared.prefill + 1):
            yield from self._hello(shared._replace(known=life), hands)
        if self.bounds.damage and not shared.spoiled:
            spoiled = self._state(shared._replace(spoiled=True), hands)
            yield Move("a block of decode's prefix cache changes", spoiled, False, (), None)
        if self.bounds.chained and shared.heard is Answer.NONE:
            yield from self._router(shared, hands)

    def _router(self, shared: Shared, hands: list[Hand]) -> Iterator[Move]:
        """It aims at another target at any moment, and hears of outcomes at any later one."""
        if shared.target + 1 < len(hands) and hands[shared.target].source is not None:
            aims = self._state(shared._replace(target=shared.target + 1), hands)
            yield Move(f"the router aims at h{shared.target + 1}", aims, False, (), None)
        for hand in hands:
            if hand.source_said is not Answer.TOKENS:
                continue
            believed = hand.place == shared.target or not self._rules.outcomes_name_their_handoff
            heard = Answer.TOKENS if believed else Answer.ERROR  # the attempt fails, and is made again
            lie = believed and hands[shared.target].source_said is not Answer.TOKENS
            after = self._state(shared._replace(heard=heard), hands)
            yield Move(
                f"the router hears HandedOff of h{hand.place}", after, False, (), Promise.NO_LIE if lie else None
            )

    def _hello(self, shared: Shared, hands: list[Hand]) -> Iterator[Move]:
        """A message of a newer life: what older ones have here ends."""
        ways: list[tuple[Shared, list[Step]]] = [(shared, [])]
        for hand in hands:
            ways = [
                (step.shared, [*steps, step])
                for before, steps in ways
                for step in self._decode.peer_restarted(hand, before)
            ]
        for after, steps in ways:
            seen = tuple((place, step.seen) for place, step in enumerate(steps) if step.seen is not None)
            self.walked.update((one.before, one.event) for _, one in seen)
            broken = next((step.broken for step in steps if step.broken), None)
            state = self._state(after, [step.hand for step in steps])
            yield Move(f"decode hears from prefill, epoch {shared.known}", state, False, seen, broken)

    def _state(self, shared: Shared, hands: list[Hand]) -> State:
        return (self._shared.of(shared), *(self._hands.of(hand) for hand in hands))


def wrong_hand(hand: Hand, shared: Shared) -> Promise | None:
    """The promise that one hand-off breaks as it stands."""
    leased = hand.target in (*LEASED, TargetState.DRAINING) and hand.blocks
    if (hand.window is Window.OPEN or hand.inside) and not leased:
        return Promise.FENCED
    if hand.writing is not Writing.NONE and not hand.held:
        return Promise.SOURCE_READ
    stale = isinstance(hand.target, TargetState) and (hand.prefill < shared.known or hand.decode != shared.decode)
    if stale and (hand.window is Window.OPEN or hand.target in LEASED):
        return Promise.STALE
    return None


def forgotten(hand: Hand) -> Hand:
    """A hand-off after its decode worker's life: what it held is gone with it; what was sent may still come."""
    out = {Writing.INSIDE: Writing.UNDER_WAY}
    return hand._replace(
        writing=out.get(hand.writing, hand.writing),
        late=out.get(hand.late, hand.late),
        target=Before.UNKNOWN,
        ended=False,
        window=Window.NONE,
        landed=0,
        damaged=False,
        stale=False,
        judged=False,
        blocks=0,
        target_said=Answer.NONE,
    )


@dataclass
class Explored:
    """What was found. `broken` with its `trace`, when a promise does not hold."""

    num_states: int = 0
    num_moves: int = 0
    broken: Promise | None = None
    trace: list[str] = field(default_factory=list)
    answers: Counter[tuple[Answer, Answer]] = field(default_factory=Counter)
    states: list[State] = field(default_factory=list)

    def story(self) -> str:
        """The counterexample, for people."""
        return "\n".join([f"{self.num_states} states: {self.broken or 'every promise holds'}", *self.trace])


def explore(model: Model) -> Explored:
    """Breadth first, so that a counterexample is a shortest one."""
    found = Explored()
    states = [model.start]
    numbers = {model.start: 0}
    came_from: list[tuple[int, str]] = [(0, "")]
    promised: list[list[int]] = []
    for at in itertools.count():
        if at == len(states):
            break
        state = states[at]
        ways: list[int] = []
        problem = model.wrong(state)
        for move in () if problem else model.moves(state):
            found.num_moves += 1
            number = numbers.setdefault(move.after, len(states))
            if number == len(states):
                states.append(move.after)
                came_from.append((at, move.text))
            if move.broken:
                return _broken(model, found, move.broken, [*_way(states, came_from, at), (move.text, move.after)])
            if move.promised and number != at:
                ways.append(number)
        promised.append(ways)
        if not ways:
            problem = problem or model.unsettled(state)
        found.num_states = len(states)
        if problem:
            return _broken(model, found, problem, _way(states, came_from, at))
    if (stuck := _endless(promised)) is not None:
        return _broken(model, found, Promise.FREED, _way(states, came_from, stuck))
    found.states = states
    for state in states:
        found.answers.update((hand.source_said, hand.target_said) for hand in model.look(state)[1])
    return found


def _endless(ways: list[list[int]]) -> int | None:
    """A state from which promised steps go round for ever; None when every way of them ends."""
    left = [len(to) for to in ways]
    back: list[list[int]] = [[] for _ in ways]
    for at, to in enumerate(ways):
        for number in to:
            back[number].append(at)
    todo = [at for at, count in enumerate(left) if not count]
    for number in todo:
        for at in back[number]:
            left[at] -= 1
            if not left[at]:
                todo.append(at)
    return next((at for at, count in enumerate(left) if count), None)


def _way(states: list[State], came_from: list[tuple[int, str]], at: int) -> list[tuple[str, State]]:
    way = []
    while at:
        before, text = came_from[at]
        way.append((text, states[at]))
        at = before
    return way[::-1]


def _broken(model: Model, found: Explored, promise: Promise, way: list[tuple[str, State]]) -> Explored:
    found.broken = promise
    hands = model.look(model.start)[1]
    for number, (text, state) in enumerate(way, 1):
        found.trace.append(f"{number:3}. {text}")
        after = model.look(state)[1]
        for place, (old, new) in enumerate(zip(hands, after, strict=True)):
            if old != new:
                found.trace.append(f"       h{place}: {new.outline()}")
        hands = after
    found.trace.append(f"     ▶ {promise}")
    return found
