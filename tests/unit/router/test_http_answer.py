"""A client that has left already costs nothing: its answer is not begun. What is long to say is not said on the loop."""

import asyncio
import json
import threading
from pathlib import Path

import pytest

from contracts import wire
from contracts.request import FinishReason, TokenDelta, TokenLogprob
from observability.stages import Spent, StageTimes
from router.choosing.route import Route
from router.exchange import Ending, Piece, Usage
from router.http.answer import AnswerResponse
from router.http.visit import SCOPE_KEY, Visit
from router.openai.format import ChatFormat, CompletionFormat, Echo, Frame
from router.text.background import Background
from router.text.model_card import load_model_card


class Form:
    """Says nothing."""

    def chunk(self, piece) -> bytes:
        return b"data: piece\n\n"

    def closing(self, usage: Usage) -> bytes:
        return b""

    def whole(self, answers) -> bytes:
        return b"{}"

    def takes_long(self, pieces) -> bool:
        return False


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
        response = AnswerResponse(self.pieces(), Form(), stream, "r", None, Background())
        await response({SCOPE_KEY: self.visit}, self.receive, self.send)


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


CARD = load_model_card(Path(__file__).parents[2] / "fixtures/tiny-austen", "tiny")
TOP = tuple((token_id, -0.5 * token_id) for token_id in range(1, 21))


def whole_answer(num_prompt: int) -> Piece:
    """As it comes from a worker: an answer to a prompt of which every token is weighed."""
    entries = (None, *(TokenLogprob(300 + i % 90, -1.5 - i, 30, TOP) for i in range(1, num_prompt)))
    delta = wire.delta_from_pb(wire.delta_to_pb(TokenDelta("r", 0, (9,), (TokenLogprob(9, -0.5, 1, TOP),), entries)))
    ids = tuple(5 if entry is None else entry.token_id for entry in entries)
    ending = Ending(FinishReason.LENGTH, None, Spent(StageTimes()), None, Route.COLOCATED)
    return Piece("x", (9,), delta.logprobs, ids, delta.prompt_logprobs, ending, usage=Usage(num_prompt, 1, 0))


def form_of(kind: str):
    frame = {
        "response_id": "r",
        "created": 1,
        "model": "m",
        "fingerprint": "f",
        "tokenizer": CARD.tokenizer,
        "logprobs": True,
    }
    if kind == "echo":
        return CompletionFormat(Frame(**frame, echo=Echo((None,))))
    return (CompletionFormat if kind == "completion" else ChatFormat)(Frame(**frame, prompt_logprobs=True))


@pytest.mark.parametrize(("num_prompt", "aside"), [(200, False), (600, True)])
@pytest.mark.parametrize(("kind", "stream"), [("echo", False), ("echo", True), ("completion", False), ("chat", False)])
async def test_what_is_long_to_say_is_said_in_a_thread_and_is_the_same(kind, stream, num_prompt, aside):
    said_in = []
    form = form_of(kind)
    name = "chunk" if stream else "whole"
    say = getattr(form, name)
    setattr(form, name, lambda what: (said_in.append(threading.current_thread().name), say(what))[1])

    async def pieces():
        yield whole_answer(num_prompt)

    sent = []

    async def send(message):
        sent.append(message.get("body", b""))

    await AnswerResponse(pieces(), form, stream, "r", None, Background())({SCOPE_KEY: Visit()}, None, send)
    assert [name.startswith("background") for name in said_in] == [aside]
    expected = getattr(form_of(kind), name)(whole_answer(num_prompt) if stream else [whole_answer(num_prompt)])
    body = b"".join(sent).removesuffix(b"data: [DONE]\n\n")
    assert body == expected
    choice = json.loads(body.removeprefix(b"data: "))["choices"][0]
    shown = choice["logprobs"]["top_logprobs"] if kind == "echo" else json.loads(body).get("prompt_logprobs")
    shown = choice.get("prompt_logprobs") if shown is None else shown
    assert len(shown) == num_prompt + (kind == "echo")
    assert shown[0] is None
    assert len(shown[-1 if kind != "echo" else -2]) == 21, (
        "and the prompt's own token, which is not among the likeliest"
    )
