"""Metrics as text: the same as the library's, of a moment after whoever asked came, and never most of a loop's time."""

import asyncio

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector

from observability.exposition import MOST_S, SHARE, Exposition


class Costly(Collector):
    """Each collection takes so long; notes the moments."""

    def __init__(self, cost_s):
        self.cost_s, self.now_s = cost_s, 0.0
        self.moments = []

    def now(self):
        return self.now_s

    async def sleep(self, delay_s):
        self.now_s += delay_s
        await asyncio.sleep(0)

    def collect(self):
        self.moments.append(self.now_s)
        self.now_s += self.cost_s
        return ()


def exposition(costly):
    registry = CollectorRegistry()
    registry.register(costly)
    made = Exposition(registry, costly.now, costly.sleep)
    costly.moments.clear()  # registering collects
    return made


async def test_it_is_what_the_library_says():
    registry = CollectorRegistry()
    Counter("a", "A, with\nlines", ["b"], registry=registry).labels('x"\n').inc()
    Histogram("c", "C", registry=registry).observe(1.0)
    costly = Costly(0.0)
    assert await Exposition(registry, costly.now, costly.sleep).text() == generate_latest(registry)


async def test_all_that_have_come_get_one_text_and_who_comes_later_a_newer_one():
    costly = Costly(0.01)
    under_test = exposition(costly)
    await asyncio.gather(*(under_test.text() for _ in range(1000)))
    assert len(costly.moments) <= 2
    await under_test.text()
    assert len(costly.moments) <= 3


async def test_who_leaves_holds_nobody_up():
    under_test = exposition(Costly(0.01))
    leaving = [asyncio.create_task(under_test.text()) for _ in range(3)]
    await asyncio.sleep(0)
    for task in leaving[:2]:
        task.cancel()
    async with asyncio.timeout(1):
        assert await leaving[2] == await under_test.text()


async def test_endless_scrapes_take_no_more_than_their_share():
    costly = Costly(0.04)
    under_test = exposition(costly)
    for _ in range(500):
        await under_test.text()
    spent_s = 500 * costly.cost_s
    assert spent_s <= MOST_S + costly.now_s * SHARE + costly.cost_s
    assert spent_s >= costly.now_s * SHARE * 0.9, "and who asks is not kept waiting for nothing"
