"""What is a commit's time, and what is not: the way to the decode worker and its work until the engine has the request."""

import asyncio

import pytest

from contracts.clock import VirtualClock
from contracts.ticket import CommitResponse
from contracts.worker import WorkerRef
from prefill_service.chain import CommitWatch

P, D = WorkerRef("p", 1), WorkerRef("d", 1)


class Peer:
    """A decode worker `way_s` away, each way; it gives the request to its engine after `checked_s` of the `took_s` it takes."""

    def __init__(self, clock, way_s, took_s, checked_s, lost=0):
        self._clock, self._way_s, self._took_s, self._checked_s, self._lost = clock, way_s, took_s, checked_s, lost

    async def commit(self, ticket):
        await self._clock.sleep(self._way_s + self._took_s + self._way_s)
        if self._lost:
            self._lost -= 1
            raise TimeoutError
        return CommitResponse(ticket, P, D, 1, self._took_s, self._checked_s)


@pytest.mark.parametrize(
    ("way_s", "took_s", "checked_s", "commit_s"),
    [
        (0.0, 0.0, 0.0, 0.0),
        (0.25, 0.0, 0.0, 0.25),
        (0.25, 1.0, 1.0, 1.25),  # a slow landing
        (0.25, 1.0, 0.5, 0.75),  # an engine that takes its time to answer: its queue has begun by then
    ],
)
async def test_a_commit_is_one_way_and_the_landing(way_s, took_s, checked_s, commit_s):
    clock = VirtualClock()
    watch = CommitWatch(Peer(clock, way_s, took_s, checked_s), clock)
    committing = asyncio.ensure_future(watch.commit("h"))
    await clock.advance(10.0)
    await committing
    assert (watch.commit_began, watch.commit_s) == (0.0, commit_s)


async def test_a_commit_that_is_said_again_began_when_it_was_said_first():
    clock = VirtualClock()
    watch = CommitWatch(Peer(clock, 0.25, 1.0, 1.0, lost=1), clock)
    for expected in (TimeoutError, None):
        committing = asyncio.ensure_future(watch.commit("h"))
        await clock.advance(1.5)
        if expected is None:
            await committing
        else:
            with pytest.raises(expected):
                await committing
    assert (watch.commit_began, watch.commit_s) == (0.0, 1.5 + 1.25)
