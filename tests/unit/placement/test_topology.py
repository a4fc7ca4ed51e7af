"""Cores, siblings, nodes and time limits from files laid out as the kernel's are."""

import pytest

from engine.placement.topology import Core, Topology, parse_cpus, read_quota, read_topology, topology_of


def machine(folder, siblings, nodes):
    """`siblings` by CPU as the kernel writes them, `nodes` by number."""
    for cpu, text in siblings.items():
        topology = folder / f"cpu/cpu{cpu}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(text + "\n")
    for node, text in nodes.items():
        (folder / f"node/node{node}").mkdir(parents=True)
        (folder / f"node/node{node}/cpulist").write_text(text + "\n")
    return folder


def two_sockets(folder):
    """Two nodes of two cores with two threads each, numbered as Linux does: first threads first."""
    siblings = {cpu: f"{cpu % 4},{cpu % 4 + 4}" for cpu in range(8)}
    return machine(folder, siblings, {0: "0-1,4-5", 1: "2-3,6-7"})


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", (0,)), ("0-3,8\n", (0, 1, 2, 3, 8)), ("", ()), ("x", ()), ("1-", ()), ("0,,1", ())]
)
def test_the_kernels_lists(text, cpus):
    assert parse_cpus(text) == cpus


def test_cores_have_their_threads_and_nodes(tmp_path):
    cores = topology_of(range(8), two_sockets(tmp_path)).cores
    assert cores == (Core((0, 4), 0), Core((1, 5), 0), Core((2, 6), 1), Core((3, 7), 1))


def test_what_may_not_be_used_is_not_there(tmp_path):
    topology = topology_of({5, 6, 2, 3}, two_sockets(tmp_path))
    assert topology.cores == (Core((2, 6), 1), Core((3,), 1), Core((5,), 0))
    assert topology.num_threads == 3 and topology.nodes == (0, 1)
    assert topology.on((2, 5)).cores == (Core((2,), 1), Core((5,), 0))


def test_a_sandbox_without_files_has_cores_all_the_same(tmp_path):
    assert topology_of({1, 0}, tmp_path).cores == (Core((0,)), Core((1,)))


def test_threads_are_cores_within_the_quota():
    cores = tuple(Core((n, n + 4)) for n in range(4))
    assert Topology(cores).num_threads == 4
    assert Topology(cores, 2.5).num_threads == 2
    assert Topology(cores, 0.5).num_threads == 1
    assert Topology(cores, 64.0).num_threads == 4


def group(mount, path, name, text):
    folder = mount / path
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text + "\n")


def test_the_least_quota_on_the_way_up_counts(tmp_path):
    mount, own = tmp_path / "mount", tmp_path / "own"
    own.write_text("0::/system/worker\n")
    group(mount, "system/worker", "cpu.max", "max 100000")
    assert read_quota(mount, own) is None
    group(mount, "system", "cpu.max", "150000 100000")
    assert read_quota(mount, own) == 1.5
    group(mount, "system/worker", "cpu.max", "50000 100000")
    assert read_quota(mount, own) == 0.5


def test_the_first_version_of_control_groups_has_them_elsewhere(tmp_path):
    mount, own = tmp_path / "mount", tmp_path / "own"
    own.write_text("4:memory:/box\n3:cpu,cpuacct:/box\n")
    group(mount, "cpu,cpuacct/box", "cpu.cfs_quota_us", "-1")
    group(mount, "cpu,cpuacct/box", "cpu.cfs_period_us", "100000")
    assert read_quota(mount, own) is None
    group(mount, "cpu,cpuacct/box", "cpu.cfs_quota_us", "300000")
    assert read_quota(mount, own) == 3.0


def test_a_container_that_sees_its_own_end_of_the_tree_only(tmp_path):
    mount, own = tmp_path / "mount", tmp_path / "own"
    own.write_text("0::/host/only/path\n")
    group(mount, ".", "cpu.max", "200000 100000")
    assert read_quota(mount, own) == 2.0
    assert read_quota(mount, tmp_path / "nothing") is None


def test_this_machine_has_cores():
    topology = read_topology()
    assert 1 <= topology.num_threads <= len(topology.cores)
    assert len({cpu for core in topology.cores for cpu in core.cpus}) == sum(len(core.cpus) for core in topology.cores)
