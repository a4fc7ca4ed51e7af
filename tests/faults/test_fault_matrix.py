"""Every edge of the protocol × everything that can happen there × three seeds: the right tokens or the right error, in time,
and nothing left behind.

    rehearsal (no fault) ──▶ what crosses when, for whom ──▶ choose an occurrence ──▶ the same history up to it, then the fault

What a client may get (the router's README and docs/adr/0007 say why):

    fault                                                     the request it hits              every other request
    drop, delay, duplicate, reorder, error, peer restart,     exactly its tokens               exactly its tokens
    pool full
    cancel (its client leaves)                                nothing more, or all if it       exactly its tokens
                                                              was whole already
    deadline (its own time is over at that very moment)       DEADLINE_EXCEEDED, or all        exactly its tokens
"""

from __future__ import annotations

import functools
import logging
import random
from dataclasses import dataclass

import pytest

from contracts.clock import VirtualClock
from contracts.errors import ErrorCode
from tests.faults.load import clients
from tests.faults.virtual_time import run
from tests.faults.wire import Edge, Fault, Kind
from tests.faults.world import Client, Loud, Setup, World

SEEDS = range(3)
VICTIM_MAY = {
    Kind.LEAVE: {"left", "tokens"},
    Kind.DEADLINE: {ErrorCode.DEADLINE_EXCEEDED.value, "tokens"},
}
NEED_FAILED_WRITES = (Edge.HANDOFF_FAILED, Edge.RETARGET)  # crossed only where something else went wrong before
PATIENCE_S = 6.0  # one fault costs nobody more, where 20 are allowed: nobody is saved by a deadline
SLACK_S = 0.05  # after its deadline a client has its error


@dataclass(frozen=True)
class History:
    """What is worth to be known of a world after its end."""

    world: World
    clients: list[Client]

    def victims(self) -> list[Client]:
        """Those whose own error, or own leaving, was planned and took place while they ran."""
        hits = [met for met, fault in self.world.wire.hits if fault.kind in VICTIM_MAY]
        return [client for met in hits if (client := self.world.owner(met)) is not None]


def lived(setup: Setup, asked: list[Client]) -> History:
    """One whole history. AssertionError when something is left behind, hangs, or says an error that nobody caused."""

    async def main(clock: VirtualClock) -> World:
        world = World(clock, setup)
        await world.start()
        await world.serve(asked)
        await world.calm()
        await world.close()
        return world

    loud = Loud()
    logging.getLogger().addHandler(loud)
    try:
        world = run(main)
    finally:
        logging.getLogger().removeHandler(loud)
    assert not loud.said, loud.said
    return History(world, asked)


@functools.cache
def rehearsal(seed: int, failing_writes: int) -> History:
    return lived(Setup(seed, failing_writes=failing_writes), clients(seed))


def check(client: Client, may: set[str]) -> None:
    """It got what it may get, when it may, and never a token that is not its own."""
    assert client.outcome in may, f"client {client.number}: {client.outcome}, {client.error!r}"
    for index in range(client.ask.n):
        got, whole = tuple(client.tokens.get(index, ())), client.expected(index)
        assert got == (whole if client.outcome == "tokens" else whole[: len(got)]), f"client {client.number}"
    assert client.ended_s <= client.start_s + client.timeout_s + SLACK_S, f"client {client.number} came too late"


@pytest.mark.parametrize("failing_writes", [0, 2])
@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_fault_all_is_well_and_every_edge_is_crossed(seed: int, failing_writes: int) -> None:
    history = rehearsal(seed, failing_writes)
    for client in history.clients:
        check(client, {"tokens"})
    crossed = {met.crossing.edge for met in history.world.wire.record}
    assert crossed >= set(Edge) - (set() if failing_writes else set(NEED_FAILED_WRITES))


def test_one_seed_is_one_history() -> None:
    again = lived(Setup(1), clients(1))
    assert again.world.wire.record == rehearsal(1, 0).world.wire.record


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize("edge", Edge)
def test_fault(edge: Edge, kind: Kind, seed: int) -> None:
    failing_writes = 2 if edge in NEED_FAILED_WRITES else 0
    before = rehearsal(seed, failing_writes)
    crossings = [met for met in before.world.wire.record if met.crossing.edge is edge]
    rng = random.Random(f"{edge} {kind} {seed}")
    occurrence = (0, rng.randrange(len(crossings)), len(crossings) - 1)[seed % 3]
    asked = clients(seed)
    if kind is Kind.DEADLINE:
        owner = before.world.owner(crossings[occurrence])
        assert owner is not None
        # While the message is on its way: after it was sent, before the quickest arrives.
        asked[owner.number].timeout_s = crossings[occurrence].at_s - owner.start_s + 0.00005

    plan = (Fault(edge, kind, occurrence, seed),)
    history = lived(Setup(seed, plan, failing_writes=failing_writes), asked)

    assert history.world.wire.hits, "the fault of the plan was never met"
    victims = history.victims()
    for client in history.clients:
        check(client, VICTIM_MAY[kind] if client in victims else {"tokens"})
    assert max(client.ended_s - client.start_s for client in history.clients) < PATIENCE_S
    for victim in victims:
        was_over = before.clients[victim.number].ended_s <= crossings[occurrence].at_s + 0.001
        assert was_over or victim.outcome != "tokens", f"{kind} did not reach client {victim.number}"
