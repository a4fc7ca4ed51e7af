"""Long work runs in few threads that give way to the event loop; what is cancelled before its turn is not begun."""

import asyncio
import os
import sys
import threading

import pytest

from router.text.background import Background


async def test_no_more_at_once_than_threads():
    background, lock = Background(2), threading.Lock()
    running, most, gate = 0, 0, threading.Event()

    def work() -> None:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        gate.wait(10)
        with lock:
            running -= 1

    tasks = [asyncio.ensure_future(background.run(work)) for _ in range(6)]
    while most < 2:
        await asyncio.sleep(0)
    gate.set()
    await asyncio.gather(*tasks)
    assert most == 2


@pytest.mark.skipif(sys.platform != "linux", reason="priorities are the process's there")
async def test_its_threads_come_after_the_loop():
    theirs = await Background(1).run(lambda: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
    ours = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    assert theirs == 10
    assert ours < theirs


async def test_what_is_cancelled_before_its_turn_is_not_begun():
    background, gate, begun = Background(1), threading.Event(), []
    first = asyncio.ensure_future(background.run(lambda: gate.wait(10)))
    second = asyncio.ensure_future(background.run(lambda: begun.append(1)))
    await asyncio.sleep(0)
    second.cancel()
    await asyncio.wait((second,))
    gate.set()
    await first
    await background.run(lambda: None)  # behind it in the queue
    assert not begun


async def test_an_error_is_the_callers():
    with pytest.raises(ZeroDivisionError):
        await Background(1).run(lambda: 1 // 0)


def test_one_core_is_left_to_the_loop():
    assert 1 <= Background().num_threads <= 4
