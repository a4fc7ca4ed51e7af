"""A client leaves at any moment of its request's life: everything is free on both sides within one engine step and 100 ms.

    rehearsal ──▶ every instant at which something happens, just before, just after, and between ──▶ leave there ──▶ calm in time

The bound is on virtual time, so it is what the protocol takes, not what the machine does.
"""

from __future__ import annotations

import itertools
import random

import pytest

from contracts.clock import VirtualClock
from router.choosing.route import Route
from tests.faults.load import ask, clients
from tests.faults.test_fault_matrix import check
from tests.faults.virtual_time import run
from tests.faults.wire import Edge
from tests.faults.workers import held, step_time_of
from tests.faults.world import Client, Setup, World

BOUND_S = step_time_of(64) + 0.1  # the longest step is a full chunk


def leave(clients: list[Client]) -> None:
    """All at once."""
    for client in clients:
        assert client.task is not None
        client.task.cancel()


def shape(name: str) -> Client:
    """Each prompt of several chunks and each answer takes longer than the bound, so that one that goes on is seen."""
    rng = random.Random(5)

    def prompt(num_tokens: int) -> tuple[int, ...]:
        return tuple(rng.randrange(1, 1000) for _ in range(num_tokens))

    asks = {
        "chunks": ask(0, prompt(440), max_tokens=50),
        "short": ask(0, prompt(10), max_tokens=50),
        "alone": ask(0, prompt(440), max_tokens=50, route=Route.COLOCATED),
        "three answers": ask(0, prompt(70), max_tokens=50, n=3, temperature=1.0),
        "one token": ask(0, prompt(440), max_tokens=1),
    }
    return Client(0, 0.05, asks[name])


SHAPES = ("chunks", "short", "alone", "three answers", "one token")
WRITING = ("chunks", "short", "three answers")
LIVES = [(name, 0) for name in SHAPES] + [(name, 3) for name in WRITING]  # shape, how many of its writes fail


def rehearsed(setup: Setup, client: Client) -> list[float]:
    """The moments of its life that are worth leaving at."""

    async def main(clock: VirtualClock) -> World:
        world = World(clock, setup)
        await world.start()
        await world.serve([client])
        await world.calm()
        await world.close()
        return world

    world = run(main)
    check(client, {"tokens"})
    met = [m for m in world.wire.record if client.start_s <= m.at_s <= client.ended_s]
    deltas = [m.at_s for m in met if m.crossing.edge is Edge.DELTAS]
    steady_s = deltas[6] if len(deltas) > 6 else client.ended_s  # from there on one step is as the other
    instants = sorted({m.at_s for m in met})
    early = [at for at in instants if at <= steady_s]
    late = [at for at in instants if at > steady_s][::16]
    between = [(a + b) / 2 for a, b in itertools.pairwise(early)]
    grid = [client.start_s + i * 0.004 for i in range(int((steady_s - client.start_s) / 0.004) + 1)]
    return sorted({*early, *late, *(at + 0.00001 for at in early), *between, *grid})


@pytest.mark.parametrize(("name", "failing_writes"), LIVES)
def test_leaving_at_every_moment_frees_everything_at_once(name: str, failing_writes: int) -> None:
    setup = Setup(num_prefill=1, failing_writes=failing_writes)
    moments = rehearsed(setup, shape(name))
    assert len(moments) >= 20
    for moment_s in moments:

        async def main(clock: VirtualClock, moment_s: float = moment_s) -> None:
            world, client = World(clock, setup), shape(name)
            await world.start()
            serving = world.begin([client])
            await clock.sleep(moment_s - clock.now())
            leave([client])
            await world.calm(BOUND_S)
            await serving
            check(client, {"left", "tokens"})
            await world.close()

        run(main)


@pytest.mark.parametrize("moment_s", [0.075, 0.11, 0.12, 0.13, 0.2, 0.4])
def test_a_session_that_breaks_frees_what_it_carried_at_once(moment_s: float) -> None:
    """Here the client is the router: it goes on elsewhere, and nobody computes an answer that nobody reads."""

    async def main(clock: VirtualClock) -> None:
        world = World(clock, Setup(num_prefill=1))
        asked = [Client(i, 0.05, ask(i, (*range(i + 1, i + 100),), max_tokens=300)) for i in range(4)]
        await world.start()
        serving = world.begin(asked)
        await clock.sleep(moment_s - clock.now())
        decode = world.lives["d0"]
        carried = {lease.holder for lease in decode.engine._kv.living_leases()}
        world.network.cut(world.router, decode.process)
        await clock.sleep(BOUND_S)
        assert not carried & {lease.holder for lease in decode.engine._kv.living_leases()}
        await serving
        for client in asked:
            check(client, {"tokens"})
        await world.calm()
        await world.close()

    run(main)


@pytest.mark.parametrize("moment_s", [0.07, 0.11, 0.15, 0.19, 0.23, 0.27])
def test_a_router_that_dies_leaves_nothing_at_its_workers(moment_s: float) -> None:
    """Every client of it leaves at once, and nobody says goodbye."""

    async def main(clock: VirtualClock) -> None:
        world = World(clock, Setup())
        await world.start()
        serving = world.begin(clients(3))
        await clock.sleep(moment_s - clock.now())
        assert any(held(life) for life in world.lives.values())
        world.network.kill(world.router)
        await clock.sleep(BOUND_S)
        assert not [what for life in world.lives.values() for what in held(life)]
        leave(world.clients)
        await serving
        await world.close()

    run(main)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("moment_s", [0.06, 0.2, 0.5, 1.5])
def test_two_hundred_leave_at_once(moment_s: float, seed: int) -> None:
    """Some run, some wait in an engine, some for room, some to be let in; nothing of them stays, and one who stays is served."""

    async def main(clock: VirtualClock) -> None:
        world = World(clock, Setup(seed, max_running=150))
        await world.start()
        asked = [client for part in range(23) for client in clients(100 * seed + part)][:200]
        for number, client in enumerate(asked):
            client.number = number
        stays = clients(77)[1]
        serving = world.begin([*asked, stays])
        await clock.sleep(moment_s - clock.now())
        leave(asked)
        await world.calm_but(stays, BOUND_S)
        await serving
        for client in asked:
            check(client, {"left", "tokens"})
        check(stays, {"tokens"})
        await world.calm(BOUND_S)
        await world.close()

    run(main)
