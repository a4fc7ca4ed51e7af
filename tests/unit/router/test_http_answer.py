"""A client that has left already costs nothing: its answer is not begun."""

import asyncio

import pytest

from router.exchange import Usage
from router.http.answer import AnswerResponse


class Form:
    """Says nothing."""

    def chunk(self, piece) -> bytes:
        return b"data: piece\n\n"

    def closing(self, usage: Usage) -> bytes:
        return b""

    def whole(self, answers) -> bytes:
        return b"{}"


class Door:
    """A server's side of one request whose client leaves when `left` is set."""

    def __init__(self) -> None:
        self.begun = 0
        self.closed = 0
        self.left = asyncio.Event()

    async def pieces(self):
        self.begun += 1
        try:
            await asyncio.Event().wait()
            yield
        finally:
            self.closed += 1

    async def receive(self):
        await self.left.wait()
        return {"type": "http.disconnect"}

    async def send(self, message) -> None:
        raise AssertionError("nobody reads it")


@pytest.mark.parametrize("stream", [True, False])
async def test_who_left_before_it_began_is_not_answered(stream):
    door = Door()
    door.left.set()
    await AnswerResponse(door.pieces(), Form(), stream, "r")({}, door.receive, door.send)
    assert door.begun == 0


@pytest.mark.parametrize("stream", [True, False])
async def test_who_leaves_while_it_is_made_ends_it_before_the_response_is_over(stream):
    door = Door()
    answering = asyncio.create_task(AnswerResponse(door.pieces(), Form(), stream, "r")({}, door.receive, door.send))
    while not door.begun:
        await asyncio.sleep(0)
    door.left.set()
    await answering
    assert (door.begun, door.closed) == (1, 1)


@pytest.mark.parametrize("turns", range(5))
async def test_whose_own_task_is_cancelled_leaves_no_watch_behind(turns):
    """A server that stops cancels its requests, in whatever turn they are."""
    door = Door()
    answering = asyncio.create_task(AnswerResponse(door.pieces(), Form(), True, "r")({}, door.receive, door.send))
    for _ in range(turns):
        await asyncio.sleep(0)
    answering.cancel()
    await asyncio.wait((answering,))
    assert answering.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}
    assert door.begun == door.closed
