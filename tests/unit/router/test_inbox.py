"""An inbox keeps order and wakes its reader; turns let few at a time give tokens out, each in its order, nobody for ever."""

import asyncio
import itertools

from contracts.prefill import FirstTokens
from contracts.request import TokenDelta, TokenLogprob
from router.serving.inbox import DecodeLost, DecodeTokens, Inbox, TimeUp, Turns


def token(index: int, request_id: str = "h") -> TokenDelta:
    return TokenDelta(request_id, index, (index,))


async def turn_of_the_loop() -> None:
    await asyncio.sleep(0)


class Reader:
    """Reads as fast as it can."""

    def __init__(self, inbox: Inbox) -> None:
        self.got: list[object] = []
        self._inbox = inbox
        self.task = asyncio.ensure_future(self._read())

    @property
    def num_tokens(self) -> int:
        return sum(len(event.delta.token_ids) for event in self.got if isinstance(event, DecodeTokens))

    async def _read(self) -> None:
        while True:
            self.got.append(await self._inbox.get())


async def readers(count: int) -> tuple[list[Inbox], list[Reader]]:
    inboxes = [Inbox() for _ in range(count)]
    reading = [Reader(inbox) for inbox in inboxes]
    await turn_of_the_loop()
    return inboxes, reading


async def test_a_reader_that_keeps_up_gets_each_token_by_itself_and_at_once():
    turns, ((inbox,), (reader,)) = Turns(), await readers(1)
    for index in range(5):
        inbox.stash(token(index), turns)
        await turn_of_the_loop()
        assert reader.got[-1] == DecodeTokens(token(index))
    assert len(reader.got) == 5
    reader.task.cancel()


async def test_so_many_per_turn_in_order_and_everybody_in_the_end():
    turns, (inboxes, reading) = Turns(4), await readers(10)
    for inbox in inboxes:
        inbox.stash(token(0), turns)
    seen = []
    for _ in range(6):
        await turn_of_the_loop()
        seen.append([reader.num_tokens for reader in reading])
    counts = [sum(row) for row in seen]
    assert counts[0] == 4
    assert all(after - before <= 4 for before, after in itertools.pairwise(counts))
    assert counts[-1] == 10
    assert all(row == sorted(row, reverse=True) for row in seen)  # first come, first served
    for reader in reading:
        reader.task.cancel()


async def test_what_comes_while_one_waits_for_its_turn_comes_as_one():
    turns, (inboxes, reading) = Turns(1), await readers(8)
    for index in range(3):  # three steps in the time of one turn
        for inbox in inboxes:
            inbox.stash(token(index), turns)
    for _ in range(12):
        await turn_of_the_loop()
    assert [reader.num_tokens for reader in reading] == [3] * 8
    assert [len(reader.got) for reader in reading] == [1] * 8
    for reader in reading:
        reader.task.cancel()


async def test_one_that_never_sleeps_waits_for_its_turn_too():
    """gRPC's streams are busy writing when the next step comes: they ask before anybody has to wake them."""
    turns, (inboxes, reading) = Turns(2), await readers(4)
    for reader in reading:
        reader.task.cancel()
    await turn_of_the_loop()
    for inbox in inboxes:
        inbox.stash(token(0), turns)
    late = [Reader(inbox) for inbox in inboxes]
    await turn_of_the_loop()
    assert [reader.num_tokens for reader in late] == [1, 1, 0, 0]
    for _ in range(3):
        await turn_of_the_loop()
    assert [reader.num_tokens for reader in late] == [1, 1, 1, 1]
    for reader in late:
        reader.task.cancel()


async def test_a_first_token_and_a_loss_do_not_wait_for_a_turn():
    turns, (inboxes, reading) = Turns(1), await readers(6)
    for inbox in inboxes[:-1]:
        inbox.stash(token(0), turns)
    inboxes[-1].put_nowait(FirstTokens(token(0)))
    await turn_of_the_loop()
    assert reading[-1].got == [FirstTokens(token(0))]
    assert sum(reader.num_tokens for reader in reading[:-1]) == 1
    for reader in reading:
        reader.task.cancel()


async def test_a_reader_that_left_holds_up_nobody():
    turns, (inboxes, reading) = Turns(1), await readers(4)
    for inbox in inboxes:
        inbox.stash(token(0), turns)
    for reader in reading[:3]:
        reader.task.cancel()
    for _ in range(6):
        await turn_of_the_loop()
    assert reading[3].num_tokens == 1
    reading[3].task.cancel()


async def test_other_news_keeps_its_place_among_tokens():
    turns, inbox = Turns(), Inbox()
    inbox.stash(token(0), turns)
    inbox.put_nowait(TimeUp(None))
    inbox.stash(token(1), turns)
    inbox.stash(token(2), turns)
    inbox.put_nowait(DecodeLost("h", RuntimeError()))
    got = [await inbox.get() for _ in range(4)]
    assert got[0] == DecodeTokens(token(0))
    assert got[1] == TimeUp(None)
    assert got[2].delta.token_ids == (1, 2)
    assert isinstance(got[3], DecodeLost)


async def test_tokens_of_two_requests_are_not_one_event():
    turns, inbox = Turns(), Inbox()
    inbox.stash(token(0, "given-up"), turns)
    inbox.stash(token(1, "anew"), turns)
    assert (await inbox.get()).delta.request_id == "given-up"
    assert (await inbox.get()).delta.request_id == "anew"


async def test_idle_turns_leave_nothing_to_do_in_the_loop():
    turns, ((inbox,), (reader,)) = Turns(2), await readers(1)
    inbox.stash(token(0), turns)
    for _ in range(4):
        await turn_of_the_loop()
    assert turns._next is None
    assert not turns._waiting
    reader.task.cancel()


async def test_what_is_read_counts_no_more():
    turns, inbox = Turns(1_000), Inbox(8)
    for index in range(100):
        assert inbox.stash(token(2 * index), turns)
        assert inbox.stash(token(2 * index + 1), turns)
        assert (await inbox.get()).delta.token_ids == (2 * index, 2 * index + 1)


async def test_tokens_with_and_without_log_probabilities_are_not_one_event():
    """Else they would not be as many as the tokens."""
    turns, inbox = Turns(), Inbox()
    inbox.stash(TokenDelta("h", 0, (0,), (TokenLogprob(0, -0.5, 1),)), turns)
    inbox.stash(token(1), turns)
    assert [len((await inbox.get()).delta.logprobs) for _ in range(2)] == [1, 0]
