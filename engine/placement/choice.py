"""Which cores a process takes, as a pure function of what there is and what others hold.

    wanted cores ──▶ all on the one node that is left fullest by it, else on the fewest nodes ──▶ None where there are too few

A core is taken whole, with both of its hardware threads: two workers on one core would halve each other without being able
to see why. Does not know how cores are held, nor how a process keeps to them.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass

from engine.placement.topology import Core, Topology


@dataclass(frozen=True, slots=True)
class Placement:
    """What a process got.

    `cpus` are those its threads run on, empty: any. `threads` is how many compute. `nodes` are where its memory is taken from,
    empty: wherever the system likes. `shared` names those that hold some of its cores, too; `note` is why it is so.
    """

    threads: int
    cpus: tuple[int, ...] = ()
    nodes: tuple[int, ...] = ()
    shared: tuple[str, ...] = ()
    note: str = ""

    def described(self) -> str:
        """In words, for a log."""
        parts = [f"{self.threads} compute thread{'s' if self.threads > 1 else ''}"]
        parts.append(f"on cpus {written(self.cpus)}" if self.cpus else "on any cpu")
        parts += [f"memory on node {written(self.nodes)}"] if self.nodes else []
        parts += [f"shared with {', '.join(self.shared)}"] if self.shared else []
        return ", ".join(parts) + (f" ({self.note})" if self.note else "")


def written(numbers: tuple[int, ...]) -> str:
    """As the kernel writes it: (0, 1, 2, 5) is 0-2,5."""
    runs: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1] = (runs[-1][0], number)
        else:
            runs.append((number, number))
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def choose_cores(topology: Topology, count: int, taken: Set[int] = frozenset()) -> tuple[Core, ...] | None:
    """`count` cores none of whose CPUs is in `taken`; None where there are too few."""
    free: dict[int, list[Core]] = {}
    for core in topology.cores:
        if taken.isdisjoint(core.cpus):
            free.setdefault(core.node, []).append(core)
    enough = [cores for cores in free.values() if len(cores) >= count]
    if enough:
        return tuple(min(enough, key=len)[:count])
    if sum(map(len, free.values())) < count:
        return None
    largest_first = [core for cores in sorted(free.values(), key=len, reverse=True) for core in cores]
    return tuple(largest_first[:count])


def placed_on(topology: Topology, cpus: tuple[int, ...], threads: int | None) -> Placement:
    """On exactly these CPUs, which may be used; `threads` None: as many as they have cores, within the quota."""
    own = topology.on(cpus)
    return Placement(threads or own.num_threads, cpus, _memory(topology, own))


def _memory(topology: Topology, own: Topology) -> tuple[int, ...]:
    """Nodes to take memory from: said only where another choice would be possible."""
    return own.nodes if len(topology.nodes) > 1 else ()
