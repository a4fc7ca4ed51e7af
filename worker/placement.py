"""Put this process on cores: chosen or given, claimed, its threads kept to them, its memory on their node. Said at its start,
before torch is imported, which counts the cores.

    settle(Wish(cores = None | AUTO | (0, 1), threads), who)
      None   any core, as many threads as there are cores                           nothing is claimed
      AUTO   so many whole cores that nobody else holds, on one node if it can be    too few: any core, and said why
      given  these, whoever else has them                                            who does, is named

Does not know what the process computes.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Literal

from engine.placement.choice import Placement, choose_cores, placed_on
from engine.placement.claims import CpuClaims, claims_folder
from engine.placement.memory_node import prefer_nodes
from engine.placement.topology import Topology, read_topology
from observability.log import get_logger
from rpc.cores import CoreChoice, check_usable, keep_to

AUTO: Literal["auto"] = "auto"
FLAG = "--cores"
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What is asked for; `threads` None leaves it to the cores."""

    cpus: CoreChoice | None = None
    threads: int | None = None


def settle(wish: Wish, who: str) -> Placement:
    """Do it, for the rest of this process's life; `who` is the name under which others hear of it.

    Claims are held until the process ends. Raises ConfigError for a given CPU that may not be used.
    """
    if wish.cpus is not None and wish.cpus != AUTO:
        check_usable(FLAG, wish.cpus)
    topology = read_topology()
    if sys.platform != "linux" or wish.cpus is None:
        note = _crowd(topology, wish.threads)
        return Placement(wish.threads or topology.num_threads, note=note)
    try:
        claims = CpuClaims(claims_folder())
        with claims.turn():
            placement = _claimed(topology, wish, claims, who)
    except OSError as error:
        placement = replace(_unclaimed(topology, wish), note=f"others are not heard of: {error}")
    if placement.cpus:
        keep_to(FLAG, placement.cpus)
    if placement.nodes and not prefer_nodes(placement.nodes):
        placement = replace(placement, nodes=(), note="this system does not let a process choose its memory's node")
    return placement


def say_placement(placement: Placement | None) -> None:
    """What the process got; a warning where others have a part of it, or where it is too small."""
    if placement is None:
        return
    say = log.warning if placement.shared else log.info
    say("placement", got=placement.described())


def _claimed(topology: Topology, wish: Wish, claims: CpuClaims, who: str) -> Placement:
    if wish.cpus == AUTO:
        wanted = wish.threads or topology.num_threads
        others = claims.held()
        cores = choose_cores(topology, wanted, frozenset(others))
        if cores is None:
            note = f"of {len(topology.cores)} cores too few are free for {wanted} of its own"
            return Placement(wanted, note=_crowd(topology, wanted) or note)
        placement = placed_on(topology, tuple(sorted(cpu for core in cores for cpu in core.cpus)), wanted)
        claims.take(placement.cpus, who)
        return placement
    placement = _unclaimed(topology, wish)
    others = claims.take(placement.cpus, who)
    own = topology.on(placement.cpus)
    note = _crowd(own, wish.threads)
    return replace(placement, shared=tuple(f"{other} (cpu {cpu})" for cpu, other in others.items()), note=note)


def _unclaimed(topology: Topology, wish: Wish) -> Placement:
    if wish.cpus is None or wish.cpus == AUTO:
        return Placement(wish.threads or topology.num_threads)
    return placed_on(topology, wish.cpus, wish.threads)


def _crowd(topology: Topology, threads: int | None) -> str:
    """Words for more threads than cores, empty where there are not."""
    if threads is None or threads <= topology.num_threads:
        return ""
    return f"{threads} threads get into each other's way on what {topology.num_threads} may do"
