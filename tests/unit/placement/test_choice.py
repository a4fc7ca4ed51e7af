"""Which cores are taken: whole, nobody else's, on one node while one has enough, on as few as can be else."""

from hypothesis import given
from hypothesis import strategies as st

from engine.placement.choice import Placement, choose_cores, placed_on, written
from engine.placement.topology import Core, Topology

NODES = Topology((Core((0, 8), 0), Core((1, 9), 0), Core((2, 10), 1), Core((3, 11), 1), Core((4, 12), 1)))


@st.composite
def topologies(draw):
    sizes = draw(st.lists(st.integers(1, 2), min_size=1, max_size=10))
    cores, first = [], 0
    for size in sizes:
        cores.append(Core(tuple(range(first, first + size)), draw(st.integers(0, 2))))
        first += size
    return Topology(tuple(cores))


@given(topologies(), st.integers(1, 6), st.sets(st.integers(0, 12), max_size=6))
def test_whole_cores_of_nobody_on_the_fewest_nodes(topology, count, taken):
    cores = choose_cores(topology, count, taken)
    free = [core for core in topology.cores if not taken & set(core.cpus)]
    if len(free) < count:
        assert cores is None
        return
    assert cores is not None and len(set(cores)) == count and set(cores) <= set(free)
    sizes = sorted((sum(core.node == node for core in free) for node in topology.nodes), reverse=True)
    fewest = next(n for n in range(1, len(sizes) + 1) if sum(sizes[:n]) >= count)
    assert len({core.node for core in cores}) == fewest


@given(topologies(), st.lists(st.integers(1, 3), max_size=6))
def test_workers_that_come_one_after_the_other_share_nothing(topology, wishes):
    taken: set[int] = set()
    for count in wishes:
        cores = choose_cores(topology, count, taken)
        for cpu in [cpu for core in cores or () for cpu in core.cpus]:
            assert cpu not in taken
            taken.add(cpu)


def test_the_fullest_node_that_has_enough_is_used_up_first():
    assert choose_cores(NODES, 2) == (Core((0, 8), 0), Core((1, 9), 0))
    assert choose_cores(NODES, 3) == (Core((2, 10), 1), Core((3, 11), 1), Core((4, 12), 1))
    assert choose_cores(NODES, 2, {9}) == (Core((2, 10), 1), Core((3, 11), 1))


def test_memory_is_where_the_cores_are_where_there_is_a_choice():
    assert placed_on(NODES, (2, 10, 3, 11), None) == Placement(2, (2, 10, 3, 11), (1,))
    assert placed_on(NODES, (1, 2), 1) == Placement(1, (1, 2), (0, 1))
    assert placed_on(Topology((Core((0,)), Core((1,)))), (1,), None) == Placement(1, (1,))


def test_in_words():
    assert written((0, 1, 2, 5)) == "0-2,5" and written(()) == ""
    assert Placement(1).described() == "1 compute thread, on any cpu"
    full = Placement(2, (4, 0, 1), (1,), ("prefill-0 (cpu 0)",), "why")
    assert full.described() == "2 compute threads, on cpus 0-1,4, memory on node 1, shared with prefill-0 (cpu 0) (why)"
