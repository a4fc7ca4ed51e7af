"""Watchers: each gets everything in order, or is let go; there are never too many."""

import asyncio

import pytest

from contracts.errors import Overloaded
from dashboard.feed import MOST_EVENTS, MOST_WATCHERS, UNREAD, Feed


async def read(watcher) -> list[bytes]:
    async with asyncio.timeout(2):
        return [event async for event in watcher]


def unmade() -> bytes:
    raise AssertionError("a snapshot was made for somebody who is turned away")


async def test_events_come_in_order_after_the_first():
    feed = Feed()
    watcher = feed.watch(lambda: b"0")
    reading = asyncio.ensure_future(read(watcher))
    for event in (b"1", b"2"):
        await asyncio.sleep(0)
        feed.publish(event)
    feed.close()
    assert await reading == [b"0", b"1", b"2"]


async def test_who_does_not_keep_up_is_let_go_and_the_others_are_not():
    feed = Feed()
    slow, quick = feed.watch(lambda: b"0"), feed.watch(lambda: b"0")
    events = aiter(quick)
    for number in range(UNREAD + 3):
        assert await anext(events) == b"%d" % number
        feed.publish(b"%d" % (number + 1))
    kept = await read(slow)  # ends by itself
    assert kept == [b"%d" % n for n in range(UNREAD)]
    feed.leave(quick)
    assert not feed.watched


async def test_nobody_watches_for_ever_on_one_permission():
    feed = Feed()
    watcher = feed.watch(lambda: b"0")
    events = aiter(watcher)
    for number in range(MOST_EVENTS):
        assert await anext(events) == b"%d" % number
        feed.publish(b"%d" % (number + 1))
    feed.publish(b"one more")
    assert [event async for event in events] == [b"%d" % MOST_EVENTS]
    assert not feed.watched


async def test_there_are_so_many_and_no_more():
    feed = Feed()
    watchers = [feed.watch(lambda: b"") for _ in range(MOST_WATCHERS)]
    for _ in range(1000):
        with pytest.raises(Overloaded, match=str(MOST_WATCHERS)):
            feed.watch(unmade)
    feed.leave(watchers[0])
    feed.watch(lambda: b"")


async def test_a_closed_feed_takes_nobody():
    feed = Feed()
    feed.close()
    with pytest.raises(Overloaded, match="stopping"):
        feed.watch(unmade)
