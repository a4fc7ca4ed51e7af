"""What waits for a router: all of it in order, in what forms it is read, bounds, ends, and errors."""

from __future__ import annotations

import asyncio

import pytest

from contracts.errors import Draining, Overloaded
from worker.outbox import Outbox


def filled(*sizes: int, limit: int = 100, limit_bytes: int = 10_000) -> Outbox[int]:
    """Holds 0, 1, 2, … of these sizes."""
    outbox: Outbox[int] = Outbox("o", limit, limit_bytes)
    for number, size in enumerate(sizes):
        outbox.put(number, size)
    return outbox


@pytest.mark.parametrize(
    ("sizes", "batches"),
    [
        ((4, 4, 2), [[0, 1, 2]]),  # just as much as fits
        ((4, 4, 3), [[0, 1], [2]]),
        ((11, 1, 99, 1, 9), [[0], [1], [2], [3, 4]]),  # what is larger goes by itself
        ((0, 0, 0), [[0, 1, 2]]),
        ((), []),
    ],
)
async def test_a_batch_is_what_there_is_but_no_larger_than_a_message_may_be(sizes, batches) -> None:
    outbox = filled(*sizes)
    outbox.end()
    assert [batch async for batch in outbox.batches(10)] == batches


async def test_what_is_read_by_itself_stays_by_itself_and_in_order() -> None:
    outbox = filled(1, 1, 1)
    outbox.end()
    assert [item async for item in outbox.items()] == [0, 1, 2]


@pytest.mark.parametrize("read", [lambda outbox: outbox.items(), lambda outbox: outbox.batches(10)])
async def test_a_reader_is_woken_by_what_comes_by_the_end_and_by_an_error(read) -> None:
    for last in ("end", "fail"):
        outbox = filled()
        reading = read(outbox)
        for number in range(3):
            waiting = asyncio.ensure_future(anext(reading))
            await asyncio.sleep(0)
            assert not waiting.done()
            assert outbox.put(number, 1)
            assert await waiting in (number, [number])
        waiting = asyncio.ensure_future(anext(reading))
        await asyncio.sleep(0)
        if last == "end":
            outbox.end()
            with pytest.raises(StopAsyncIteration):
                await waiting
        else:
            outbox.fail(Draining("first"))
            outbox.fail(Overloaded("second"))
            with pytest.raises(Draining, match="first"):
                await waiting
        assert outbox.closed
        assert not outbox.put(3)


async def test_an_error_drops_what_is_left_an_end_does_not() -> None:
    outbox = filled(1, 1)
    outbox.fail(Draining("away"))
    read = []
    with pytest.raises(Draining):
        async for item in outbox.items():
            read.append(item)
    assert read == []


@pytest.mark.parametrize(("limit", "limit_bytes"), [(3, 10_000), (100, 21)])
async def test_who_leaves_too_much_unread_is_cut_off_and_who_reads_is_not(limit, limit_bytes) -> None:
    outbox = filled(7, 7, limit=limit, limit_bytes=limit_bytes)
    reading = outbox.items()
    for number in range(2, 50):  # what has been read counts no more
        assert outbox.put(number, 7)
        assert await anext(reading) == number - 2
    assert outbox.put(50, 7)
    assert not outbox.put(51, 7)
    assert outbox.closed
    assert len(outbox._unread) == 0
    with pytest.raises(Overloaded, match="o: 3 messages, 21 bytes were not read"):
        await anext(reading)
