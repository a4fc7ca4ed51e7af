"""A decode worker dies between its grant and its commit, at every instant: the blocks are pushed to another, at once.

rehearsal ──▶ every instant from the grant to the commit, while the prompt computes and after ──▶ kill there ──▶ one prompt
computed once, the undisturbed tokens, and hardly later than without the fault
"""

from __future__ import annotations

from contracts.clock import VirtualClock
from tests.faults.load import ask
from tests.faults.virtual_time import run
from tests.faults.wire import Edge
from tests.faults.world import RETRY, Client, Setup, World

PUSH_AGAIN_S = 0.1  # all of the prompt's blocks, and the messages around them
assert RETRY.handoff_verdict_s > 5 * PUSH_AGAIN_S


def client() -> Client:
    return Client(0, 0.05, ask(0, tuple(i % 97 + 1 for i in range(440)), max_tokens=6))


def lived(kill_at_s: float | None) -> tuple[World, Client]:
    """One request, whose decode worker is killed at this instant and comes back later as another life."""

    async def main(clock: VirtualClock) -> tuple[World, Client]:
        world, one = World(clock, Setup()), client()
        await world.start()
        ended = world.begin([one])
        if kill_at_s is not None:
            await clock.sleep(kill_at_s - clock.now())
            world.restart(target_of(world))
        await ended
        await world.calm()
        await world.close()
        return world, one

    return run(main)


def target_of(world: World) -> str:
    return next(met.crossing.target for met in world.wire.record if met.crossing.edge is Edge.RESERVE)


def crossings(world: World, edge: Edge) -> list[float]:
    return [met.at_s for met in world.wire.record if met.crossing.edge is edge]


def moments() -> tuple[list[float], float]:
    """Just before and after everything that happens from the grant to the commit; and when the undisturbed answer ends."""
    world, one = lived(None)
    (granted,), (committed,) = crossings(world, Edge.GRANT), crossings(world, Edge.COMMIT)
    assert committed - granted > 0.1, "the prompt is computed meanwhile"
    instants = sorted({met.at_s for met in world.wire.record if granted <= met.at_s < committed})
    return [at + shift for at in instants for shift in (-1e-6, 1e-6) if granted < at + shift < committed], one.ended_s


def test_a_decode_worker_that_dies_before_the_commit_costs_one_push():
    instants, undisturbed_s = moments()
    assert len(instants) > 20
    while_computing = 0
    for at_s in instants:
        world, one = lived(at_s)
        assert one.outcome == "tokens", (at_s, one.error)
        assert tuple(one.tokens[0]) == one.expected(0)
        assert len(crossings(world, Edge.RUN)) == 1, "the prompt was computed once"
        assert len(crossings(world, Edge.RETARGET)) == 1
        assert one.ended_s < undisturbed_s + PUSH_AGAIN_S, (
            f"killed at {at_s:.4f}: {one.ended_s - undisturbed_s:.3f} s later"
        )
        while_computing += crossings(world, Edge.RETARGET) < crossings(world, Edge.FIRST_TOKEN)
    assert while_computing > 5


def test_the_only_decode_worker_is_waited_for():
    instants, _ = moments()

    async def main(clock: VirtualClock) -> Client:
        world, one = World(clock, Setup(num_decode=1)), client()
        await world.start()
        ended = world.begin([one])
        await clock.sleep(instants[len(instants) // 2] - clock.now())
        world.restart(target_of(world))
        await ended
        await world.calm()
        await world.close()
        return one

    one = run(main)
    assert one.outcome == "tokens", one.error
    assert tuple(one.tokens[0]) == one.expected(0)
