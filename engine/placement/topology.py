"""What cores this process may use: which CPUs are two threads of one core, on which memory node each is, what the control group
allows of their time. Read from Linux's sysfs and procfs; elsewhere psutil's counts, as one node.

    Topology.cores ── Core(cpus = its hardware threads, node) …        num_threads: the most that compute threads may be

Compute threads are counted by cores: the second hardware thread of a core has no arithmetic and no bandwidth of its own. Does
not know workers.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil

SYSTEM = Path("/sys/devices/system")
CONTROL_GROUPS = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


@dataclass(frozen=True, slots=True)
class Core:
    """One core: the numbers of those of its hardware threads that may be used, and its memory node."""

    cpus: tuple[int, ...]
    node: int = 0


@dataclass(frozen=True, slots=True)
class Topology:
    """The cores that may be used, in the order of their first CPU. `quota` is how many cores' time the group has, None: all."""

    cores: tuple[Core, ...]
    quota: float | None = None

    @property
    def nodes(self) -> tuple[int, ...]:
        """Memory nodes that have any of the cores."""
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def num_threads(self) -> int:
        """Compute threads that do not get into each other's way: one a core, within the quota; at least one."""
        cores = len(self.cores)
        return max(1, cores if self.quota is None else min(cores, int(self.quota)))

    def on(self, cpus: Iterable[int]) -> Topology:
        """What is left of it on these CPUs."""
        kept = frozenset(cpus)
        parts = ((tuple(cpu for cpu in core.cpus if cpu in kept), core.node) for core in self.cores)
        return Topology(tuple(Core(some, node) for some, node in parts if some), self.quota)


def read_topology() -> Topology:
    """This process's, now."""
    if sys.platform != "linux":
        return Topology(tuple(Core((number,)) for number in range(psutil.cpu_count(logical=False) or 1)))
    return topology_of(os.sched_getaffinity(0), SYSTEM, read_quota(CONTROL_GROUPS, OWN_GROUPS))


def topology_of(usable: Iterable[int], system: Path, quota: float | None = None) -> Topology:
    """The cores of the `usable` CPUs, as the files under `system` (/sys/devices/system) have them.

    What they do not say (a sandbox may hide them) is taken as a core of its own, and as node 0.
    """
    usable = sorted(usable)
    node_of = {cpu: node for node, cpus in _nodes(system / "node") for cpu in cpus}
    siblings: dict[int, list[int]] = {}
    for cpu in usable:
        # A core is named by its first hardware thread, whether or not that one may be used.
        text = _text(system / f"cpu/cpu{cpu}/topology/thread_siblings_list")
        siblings.setdefault(min(parse_cpus(text), default=cpu), []).append(cpu)
    cores = (Core(tuple(cpus), node_of.get(cpus[0], 0)) for cpus in siblings.values())
    return Topology(tuple(sorted(cores, key=lambda core: core.cpus)), quota)


def parse_cpus(text: str) -> tuple[int, ...]:
    """The kernel's lists: "0-3,8" is 0, 1, 2, 3, 8. Empty for what is none."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, dash, last = part.partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            return ()
        found += range(int(first), int(last or first) + 1)
    return tuple(found)


def read_quota(mount: Path, own: Path) -> float | None:
    """How many cores' time the control groups of this process allow, the least of it and of those that it is in; None: no limit.

    `mount` is where the hierarchy is mounted, `own` the file that says where in it the process is.
    """
    limits: list[float] = []
    for line in _text(own).splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        unified = controllers == ""
        if not unified and "cpu" not in controllers.split(","):
            continue
        root = mount if unified else mount / controllers
        relative = PurePosixPath(path.lstrip("/"))
        # Inside a container the path may be the host's, of which the mount shows nothing but its own end.
        for folder in {root / part for part in (relative, *relative.parents)}:
            limits += _quota_v2(folder) if unified else _quota_v1(folder)
    return min(limits, default=None)


def _quota_v2(folder: Path) -> list[float]:
    words = _text(folder / "cpu.max").split()
    return [int(words[0]) / int(words[1])] if len(words) == 2 and all(word.isdecimal() for word in words) else []


def _quota_v1(folder: Path) -> list[float]:
    quota, period = _text(folder / "cpu.cfs_quota_us").strip(), _text(folder / "cpu.cfs_period_us").strip()
    return [int(quota) / int(period)] if quota.isdecimal() and period.isdecimal() else []


def _nodes(folder: Path) -> list[tuple[int, tuple[int, ...]]]:
    names = [path.name.removeprefix("node") for path in folder.glob("node[0-9]*")]
    return [(int(name), parse_cpus(_text(folder / f"node{name}/cpulist"))) for name in names if name.isdecimal()]


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
