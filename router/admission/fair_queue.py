"""Who of those that wait is next: the best priority class first, and inside a class a fair share to every caller.

    push ──▶ [class 0: [caller a: r1 r2 …] [caller b: r7]]  ──peek──▶ whose turn it is ──pop──▶ charged to its caller
             [class 5: [caller a: r3]]

Inside a class every caller has a counter of the tokens that it was served, over its weight; the least served is next, and a
caller that comes back is lifted to where the others are, so that nobody saves up. That is the virtual token counter of Sheng
et al., "Fairness in Serving Large Language Models" (OSDI 2024), in which start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996) is charged with tokens, first estimated, then counted. One caller's thousand requests so delay another's one by
about one request.

Classes are strict but for ageing: one turn in `ageing_turn` goes to the class whose first has waited longest, if that is
longer than `ageing_s`. So a worse class always moves, and takes at most that share.

Where there is no room left, who has most waiting makes room, whatever its priority: a better class is served first, but a caller
does not fill the queue with it. Nobody makes room for a worse class. Pure: knows no clock, loop or permit.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Generic, TypeVar


@dataclass(frozen=True, slots=True)
class QueueConfig:
    """Seconds after which a worse class gets its turns, and how many turns there are to one of those."""

    ageing_s: float = 10.0
    ageing_turn: int = 8


@dataclass(slots=True, kw_only=True, eq=False)
class Waiting:
    """One that waits. `cost` is in tokens and above 0, `since` in seconds of any clock, lower `priority` is better."""

    caller: str
    weight: float
    priority: int
    cost: float
    since: float


T = TypeVar("T", bound=Waiting)


@dataclass(slots=True, eq=False)
class _Flow(Generic[T]):
    """One caller in one class: `served` is what it was given, in tokens over its weight."""

    served: float
    weight: float
    waiting: deque[T] = field(default_factory=deque)
    cost: float = 0.0  # of all that wait


class _Class(Generic[T]):
    """The callers of one priority. `floor` is the counter of the last that was served: who comes back starts there."""

    def __init__(self) -> None:
        self.flows: dict[str, _Flow[T]] = {}  # those that wait, and those whose counter is above the floor
        self.floor = 0.0

    def push(self, item: T) -> None:
        flow = self.flows.get(item.caller)
        if flow is None:
            flow = self.flows[item.caller] = _Flow(self.floor, item.weight)
        if not flow.waiting:
            # Back at the end of the callers: of equal counters the one that waits longer is first.
            self.flows[item.caller] = self.flows.pop(item.caller)
            flow.served = max(flow.served, self.floor)
        flow.weight = item.weight
        flow.waiting.append(item)
        flow.cost += item.cost

    def first(self) -> T:
        """Of the caller with the least counter, its oldest."""
        active = (flow for flow in self.flows.values() if flow.waiting)
        return min(active, key=lambda flow: flow.served).waiting[0]

    def charge(self, caller: str, tokens: float) -> None:
        """Count what `caller` is served; its counter never falls below the floor."""
        flow = self.flows[caller]
        flow.served = max(flow.served + tokens / flow.weight, self.floor)

    def take(self, item: T) -> None:
        """Take it out, wherever it stands."""
        flow = self.flows[item.caller]
        if flow.waiting[0] is item:
            flow.waiting.popleft()
        else:
            flow.waiting.remove(item)
        flow.cost = flow.cost - item.cost if flow.waiting else 0.0

    def prune(self) -> None:
        """Forget callers of which the floor tells all."""
        for name in [name for name, flow in self.flows.items() if not flow.waiting and flow.served <= self.floor]:
            del self.flows[name]

    @property
    def idle(self) -> bool:
        """Whether nobody waits."""
        return not any(flow.waiting for flow in self.flows.values())

    def __iter__(self) -> Iterator[T]:
        return (item for flow in self.flows.values() for item in flow.waiting)


class FairQueue(Generic[T]):
    """All that wait, in one order. One turn costs as many steps as callers wait in its class."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._classes: dict[int, _Class[T]] = {}
        self._priorities: list[int] = []  # of classes in which somebody waits, best first
        self._of_caller: Counter[str] = Counter()  # how many wait, in all classes
        self._turns = 0  # since the last that went by age
        self._size = 0
        self._cost = 0.0

    def __len__(self) -> int:
        return self._size

    @property
    def cost(self) -> float:
        """Tokens of all that wait."""
        return self._cost

    def __iter__(self) -> Iterator[T]:
        """All that wait, in no order that matters."""
        return (item for priority in self._priorities for item in self._classes[priority])

    def push(self, item: T) -> None:
        """It waits from now on."""
        members = self._classes.get(item.priority)
        if members is None:
            members = self._classes[item.priority] = _Class()
            insort(self._priorities, item.priority)
        members.push(item)
        self._of_caller[item.caller] += 1
        self._size += 1
        self._cost += item.cost

    def peek(self, now: float) -> T:
        """Whose turn it is at `now`. The queue must not be empty."""
        by_age = self._by_age(now)
        return by_age if by_age is not None else self._classes[self._priorities[0]].first()

    def pop(self, now: float) -> T:
        """Take out whose turn it is, and charge its caller with its cost."""
        item = self.peek(now)
        self._turns = 0 if item.priority != self._priorities[0] else self._turns + 1
        members = self._classes[item.priority]
        members.floor = max(members.floor, members.flows[item.caller].served)
        members.charge(item.caller, item.cost)
        self.remove(item)
        return item

    def remove(self, item: T) -> None:
        """It waits no longer, and was not served."""
        members = self._classes[item.priority]
        members.take(item)
        members.prune()
        self._of_caller[item.caller] -= 1
        if not self._of_caller[item.caller]:
            del self._of_caller[item.caller]
        self._size -= 1
        self._cost = self._cost - item.cost if self._size else 0.0
        if members.idle:  # all are equal from now on: priorities are the clients' to choose, and must not pile up
            self._priorities.remove(item.priority)
            del self._classes[item.priority]

    def correct(self, item: T, tokens: float) -> None:
        """One that was popped turned out to take `tokens`, not its cost."""
        members = self._classes.get(item.priority)
        if members is not None and item.caller in members.flows:  # else all there were equal since
            members.charge(item.caller, tokens - item.cost)
            members.prune()

    def ahead_of(self, item: T) -> float:
        """About how many tokens are served before `item`, which does not wait yet: all of better classes; of its own, what
        its caller has waiting, and of each other caller at most as much again by weight."""
        tokens = 0.0
        for priority in self._priorities:
            flows = self._classes[priority].flows
            if priority < item.priority:
                tokens += sum(flow.cost for flow in flows.values())
            elif priority == item.priority:
                mine = flows[item.caller].cost if item.caller in flows else 0.0
                share = (mine + item.cost) / item.weight
                tokens += mine + sum(min(f.cost, share * f.weight) for name, f in flows.items() if name != item.caller)
        return tokens

    def displaced_by(self, item: T) -> T | None:
        """Who makes room for `item`, which does not wait yet; None when nobody has less of a right to wait than it.

        That is the newest, in its worst class, of the caller that has most waiting over its weight. `item` has a better right if
        it leaves its own caller with less than that, or with no more and is of a better class, or comes from the same caller and
        is of a better class.
        """
        found: tuple[float, int, T] | None = None
        for priority in self._priorities[bisect_left(self._priorities, item.priority) :]:
            for name, flow in self._classes[priority].flows.items():
                if flow.waiting and (found is None or (self._of_caller[name] / flow.weight, priority) > found[:2]):
                    found = self._of_caller[name] / flow.weight, priority, flow.waiting[-1]
        if found is None:
            return None
        share, _, other = found
        mine, better = (self._of_caller[item.caller] + 1) / item.weight, item.priority < other.priority
        if item.caller == other.caller:
            return other if better else None
        return other if mine < share or (better and mine <= share) else None

    def _by_age(self, now: float) -> T | None:
        """The class that gets a turn by age, if this is one."""
        if self._turns + 1 < self._config.ageing_turn or len(self._priorities) == 1:
            return None
        worse = [self._classes[priority] for priority in self._priorities[1:]]
        oldest = min(worse, key=_since)
        return oldest.first() if now - _since(oldest) > self._config.ageing_s else None


def _since(members: _Class[T]) -> float:
    return min(flow.waiting[0].since for flow in members.flows.values() if flow.waiting)
