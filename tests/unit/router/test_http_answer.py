"""A client that has left already costs nothing: its answer is not begun."""

import asyncio

import pytest

from router.exchange import Piece, Usage
from router.http.answer import AnswerResponse
from router.http.visit import SCOPE_KEY, Visit


class Form:
    """Says nothing."""

    def chunk(self, piece) -> bytes:
        return b"data: piece\n\n"

    def closing(self, usage: Usage) -> bytes:
        return b""

    def whole(self, answers) -> bytes:
        return b"{}"


class Door:
    """A server's side of one request, answered with `ready` pieces and then no more."""

    def __init__(self, ready: int = 0) -> None:
        self.begun = 0
        self.closed = 0
        self.sent = 0
        self.visit = Visit()
        self._ready = ready

    async def pieces(self):
        self.begun += 1
        try:
            for _ in range(self._ready):
                yield Piece("", ())
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            self.closed += 1

    async def receive(self):
        raise AssertionError("nobody waits for a message")

    async def send(self, message) -> None:
        self.sent += 1

    async def answer(self, *, stream: bool = True) -> None:
        await AnswerResponse(self.pieces(), Form(), stream, "r")({SCOPE_KEY: self.visit}, self.receive, self.send)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("turns", range(2))
async def test_who_left_before_it_began_is_not_answered(stream, turns):
    """What comes in the turn after the request was read is heard before anything is begun."""
    door = Door()
    answering = asyncio.create_task(door.answer(stream=stream))
    for _ in range(turns):
        await asyncio.sleep(0)
    door.visit.leave()
    await answering
    assert (door.begun, door.sent) == (0, 0)


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_while_it_is_made_ends_it_before_the_response_is_over(stream):
    door = Door(ready=1)
    answering = asyncio.create_task(door.answer(stream=stream))
    while not door.begun:
        await asyncio.sleep(0)
    door.visit.leave()
    await answering
    assert (door.begun, door.closed) == (1, 1)


@pytest.mark.parametrize("leaves", [False, True])
@pytest.mark.parametrize("turns", range(5))
async def test_whose_own_task_is_cancelled_ends_as_cancelled_and_leaves_no_watch_behind(turns, leaves):
    """A server that stops cancels its requests, in whatever turn they are, also of clients that leave at the same time."""
    door = Door(ready=1)
    answering = asyncio.create_task(door.answer())
    for _ in range(turns):
        await asyncio.sleep(0)
    if leaves and door.begun:
        door.visit.leave()
    answering.cancel()
    await asyncio.wait((answering,))
    assert answering.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert door.begun == door.closed
    door.visit.leave()  # and nobody hears it


async def test_an_answer_takes_no_task_and_one_turn_before_it_begins():
    """Each would be a wait before every first token."""
    door = Door()
    answering = asyncio.create_task(door.answer())
    await asyncio.sleep(0)
    assert not door.begun
    await asyncio.sleep(0)
    assert door.begun
    assert asyncio.all_tasks() == {asyncio.current_task(), answering}
    door.visit.leave()
    await answering
