"""Whatever comes and goes: nobody is lost, callers of a class get equal shares by weight, and a worse class always moves."""

from collections import Counter, defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.fair_queue import FairQueue, QueueConfig, Waiting

COSTS = st.floats(1.0, 1000.0)
CALLERS = st.sampled_from("abcd")


def waiting(caller="a", priority=0, cost=1.0, weight=1.0, since=0.0):
    return Waiting(caller=caller, weight=weight, priority=priority, cost=cost, since=since)


@settings(max_examples=150, deadline=None)
@given(
    backlogs=st.dictionaries(CALLERS, st.lists(COSTS, min_size=30, max_size=60), min_size=2),
    weights=st.fixed_dictionaries({name: st.sampled_from([0.5, 1.0, 3.0]) for name in "abcd"}),
    later=st.integers(0, 20),
)
def test_callers_that_always_wait_are_served_alike_by_weight(backlogs, weights, later):
    """The bound of start-time fair queueing: two backlogged callers differ by at most one of the largest requests of each.

    One of them comes only after `later` turns, and gets its share from then on, not more.
    """
    queue = FairQueue(QueueConfig())
    newcomer = min(backlogs)
    for name, costs in backlogs.items():
        if name != newcomer:
            for cost in costs:
                queue.push(waiting(name, cost=cost, weight=weights[name]))
    for _ in range(later):
        queue.pop(0.0)
    for cost in backlogs[newcomer]:
        queue.push(waiting(newcomer, cost=cost, weight=weights[newcomer]))
    served = dict.fromkeys(backlogs, 0.0)
    largest = {name: max(costs) / weights[name] for name, costs in backlogs.items()}
    while set(backlogs) <= {item.caller for item in queue}:
        item = queue.pop(0.0)
        served[item.caller] += item.cost / item.weight
        for one in backlogs:
            for other in backlogs:
                assert served[one] - served[other] <= largest[one] + largest[other] + 1e-6


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_nobody_is_lost_and_nobody_is_served_twice(data):
    queue, inside, now = FairQueue(QueueConfig(ageing_s=5.0, ageing_turn=3)), [], 0.0
    popped = []
    for _ in range(data.draw(st.integers(0, 60))):
        match data.draw(st.sampled_from(["push", "push", "pop", "remove", "correct", "wait"])):
            case "push":
                item = waiting(data.draw(CALLERS), data.draw(st.integers(-2, 2)), data.draw(COSTS), since=now)
                _check_room(item, queue.displaced_by(item), inside)
                ahead = queue.ahead_of(item)
                assert 0 <= ahead <= queue.cost + 1e-6
                queue.push(item)
                inside.append(item)
            case "pop" if inside:
                expected = queue.peek(now)
                item = queue.pop(now)
                assert item is expected
                oldest_of_its_caller = next(i for i in inside if (i.caller, i.priority) == (item.caller, item.priority))
                assert item is oldest_of_its_caller
                inside.remove(item)
                popped.append(item)
            case "remove" if inside:
                item = data.draw(st.sampled_from(inside))
                queue.remove(item)
                inside.remove(item)
            case "correct" if popped:
                queue.correct(popped.pop(), data.draw(st.floats(0.0, 3000.0)))
            case "wait":
                now += data.draw(st.floats(0.0, 10.0))
        assert len(queue) == len(inside)
        assert set(map(id, queue)) == set(map(id, inside))
        assert abs(queue.cost - sum(item.cost for item in inside)) < 1e-6
    assert len(queue._classes) == len({item.priority for item in inside}), "priorities are the clients' to choose"


def _check_room(item, other, inside):
    """Who is pushed out has more waiting than the newcomer's caller, or is its own; nobody is for a worse class."""
    counts = Counter(each.caller for each in inside)
    if other is None:
        worse = [each for each in inside if each.priority >= item.priority and each.caller != item.caller]
        most = max((counts[each.caller] for each in worse), default=0)
        assert counts[item.caller] + 1 >= most
        return
    assert other.priority >= item.priority
    newest_of_its_caller = [i for i in inside if (i.caller, i.priority) == (other.caller, other.priority)][-1]
    assert other is newest_of_its_caller
    if other.caller == item.caller:
        assert other.priority > item.priority
    else:
        assert counts[item.caller] + 1 <= counts[other.caller]


@settings(max_examples=60, deadline=None)
@given(
    turn=st.integers(1, 10), low=st.integers(1, 30), priorities=st.lists(st.integers(1, 9), min_size=30, max_size=30)
)
def test_a_worse_class_moves_and_takes_no_more_than_its_share(turn, low, priorities):
    """A better class never runs dry; every `turn`-th goes by age, once that is more than the limit."""
    queue = FairQueue(QueueConfig(ageing_s=10.0, ageing_turn=turn))
    old = [waiting("old", priorities[i], since=0.0) for i in range(low)]
    for item in old:
        queue.push(item)
    order = []
    for number in range(low * turn + 30):
        now = float(number)
        queue.push(waiting("new", 0, since=now))
        order.append(queue.pop(now))
        aged = [item for item in order if item.priority > 0]
        assert len(aged) <= max(0, number - 9) / turn + 1
    assert {id(item) for item in old} <= {id(item) for item in order[: 11 + low * turn]}


def test_before_it_is_old_a_worse_class_waits():
    queue = FairQueue(QueueConfig(ageing_s=10.0, ageing_turn=2))
    queue.push(waiting("a", 5))
    for number in range(10):
        queue.push(waiting("b", 0, since=float(number)))
        assert queue.pop(float(number)).priority == 0


def test_who_was_away_saves_nothing_up():
    queue = FairQueue(QueueConfig())
    for _ in range(100):
        queue.push(waiting("a", cost=10.0))
    for _ in range(50):
        queue.pop(0.0)
    for _ in range(50):
        queue.push(waiting("b", cost=10.0))
    counts = defaultdict(int)
    for _ in range(20):
        counts[queue.pop(0.0).caller] += 1
    assert counts == {"a": 10, "b": 10}


def test_what_was_not_used_comes_back_to_its_caller():
    """Both say that their answers take 1000 tokens; b's take 10."""
    queue = FairQueue(QueueConfig())
    for name in "ab":
        for _ in range(200):
            queue.push(waiting(name, cost=1000.0))
    counts = defaultdict(int)
    for _ in range(100):
        item = queue.pop(0.0)
        counts[item.caller] += 1
        queue.correct(item, 1000.0 if item.caller == "a" else 10.0)
    assert counts["b"] > 90
