"""What the router cannot be without comes back when it dies."""

import asyncio
import itertools

from contracts.clock import VirtualClock
from contracts.upkeep import kept_up


async def test_a_task_that_dies_is_started_again_at_growing_pauses_until_it_is_done(caplog):
    clock, began, restarts = VirtualClock(), [], []

    async def make():
        began.append(clock.now())
        if len(began) < 5:
            raise RuntimeError(f"number {len(began)}")

    task = asyncio.ensure_future(kept_up("canary", make, clock, restarts.append))
    await clock.advance(60.0)
    await task
    assert [round(b - a, 3) for a, b in itertools.pairwise(began)] == [0.1, 0.2, 0.4, 0.8]
    assert restarts == ["canary"] * 4
    assert sum("died, and is started again" in record.message for record in caplog.records) == 4


async def test_who_ran_long_pauses_little_again_and_who_is_cancelled_stays_so():
    clock, began = VirtualClock(), []

    async def make():
        began.append(clock.now())
        if len(began) in (4, 6):
            await clock.sleep(100.0)
        raise RuntimeError

    task = asyncio.ensure_future(kept_up("housekeeping", make, clock, lambda _: None))
    await clock.advance(101.0)
    assert began[:5] == [0.0, 0.1, 0.1 + 0.2, 0.1 + 0.2 + 0.4, began[3] + 100.0 + 0.1]
    task.cancel()
    await asyncio.wait((task,))
    assert task.cancelled()
