"""Whatever comes when: what an attempt reads of its inbox, joined, is what was put in, and nothing else changes its meaning."""

import asyncio
import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from contracts.request import FinishReason, TokenDelta, TokenLogprob
from observability.stages import StageTimes
from router.serving.inbox import MAX_EVENT, DecodeTokens, Inbox, TimeUp, Turns
from router.text.wording import Wording

READ, TURN, NEWS = "read", "turn", "news"
sizes = st.integers(1, 3)
orders = st.lists(st.sampled_from((READ, TURN, NEWS)), max_size=60)


def delta_at(index: int, size: int, logprobs: bool, last: bool) -> TokenDelta:
    ids = tuple(range(index, index + size))
    return TokenDelta(
        "h",
        index,
        ids,
        tuple(TokenLogprob(i, -0.5, 1, ((i, -0.5), (i + 1, -2.0))) for i in ids) if logprobs else (),
        finish_reason=FinishReason.STOP if last else None,
        stop_token_id=ids[-1] if last else None,
        num_cached_tokens=7 if index == 0 else 0,
        stages=StageTimes(decode_queue_s=0.5) if last else None,
    )


def answer(lengths: list[int], logprobs: bool) -> list[TokenDelta]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    last = len(lengths) - 1
    return [
        delta_at(start, size, logprobs, i == last) for i, (start, size) in enumerate(zip(starts, lengths, strict=True))
    ]


async def read_in_order(given_deltas: list[TokenDelta], order: list[str], limit: int) -> list[TokenDelta]:
    """Put the deltas in and read them as `order` says; then the rest."""
    inbox, turns, waiting = Inbox(), Turns(limit), list(given_deltas)
    got: list[TokenDelta] = []

    async def reader() -> None:
        while not got or got[-1].finish_reason is None:
            await gate.acquire()
            event = await inbox.get()
            assert isinstance(event, DecodeTokens)
            got.append(event.delta)

    gate = asyncio.Semaphore(0)
    task = asyncio.ensure_future(reader())
    for step in [*order, *[NEWS] * len(waiting)]:
        if step == NEWS and waiting:
            assert inbox.stash(waiting.pop(0), turns)
        elif step == READ:
            gate.release()
        else:
            await asyncio.sleep(0)
    for _ in given_deltas:
        gate.release()
    async with asyncio.timeout(5):
        await task
    return got


@settings(deadline=None)
@given(st.lists(sizes, min_size=1, max_size=12), st.booleans(), orders, st.integers(1, 3))
def test_what_is_read_joined_is_what_was_put_in(lengths, logprobs, order, limit):
    deltas = answer(lengths, logprobs)
    got = asyncio.run(read_in_order(deltas, order, limit))
    assert [i for d in got for i in d.token_ids] == [i for d in deltas for i in d.token_ids]
    assert [e for d in got for e in d.logprobs] == [e for d in deltas for e in d.logprobs]
    for before, after in itertools.pairwise(got):
        assert after.first_index == before.first_index + len(before.token_ids)
        assert before.finish_reason is None
        assert before.stop_token_id is None
        assert before.stages is None
    first, last = got[0], got[-1]
    assert (first.request_id, first.first_index, first.num_cached_tokens) == ("h", 0, 7)
    assert (last.finish_reason, last.stop_token_id, last.stages) == (
        deltas[-1].finish_reason,
        deltas[-1].stop_token_id,
        deltas[-1].stages,
    )
    assert all(len(d.logprobs) in (0, len(d.token_ids)) for d in got)


class Letters:
    """A text stream in which each token is a letter."""

    def push(self, token_ids) -> str:
        return "".join(chr(ord("a") + i % 26) for i in token_ids)

    def flush(self) -> str:
        return ""


@settings(deadline=None)
@given(
    st.lists(sizes, min_size=1, max_size=12),
    orders,
    st.lists(st.sampled_from(("c", "de", "fgh", "zz")), max_size=2).map(tuple),
    st.integers(0, 5),
)
def test_the_words_are_the_same_however_tokens_come_together(lengths, order, stops, min_tokens):
    def words(deltas: list[TokenDelta]) -> tuple[str, list[int], str | None]:
        wording = Wording(Letters(), stops, False, min_tokens)
        text, ids = "", []
        for delta in deltas:
            said = wording.feed(delta)
            text += said.text
            ids += said.token_ids
            if said.stop is not None:
                return text, ids, said.stop
        return text, ids, None

    deltas = answer(lengths, False)
    assert words(asyncio.run(read_in_order(deltas, order, 1))) == words(deltas)


@settings(deadline=None)
@given(st.integers(1, 3), st.integers(2, 20))
def test_a_gap_or_a_repetition_stays_visible(size, missing):
    async def read() -> list[int]:
        inbox, turns = Inbox(), Turns()
        for start in (0, size, size + missing, size):
            inbox.stash(delta_at(start, size, False, False), turns)
        seen = []
        while inbox._events:
            event = await inbox.get()
            seen.append((event.delta.first_index, len(event.delta.token_ids)))
        return seen

    expected = [(0, 2 * size), (size + missing, size), (size, size)]
    if missing == size:  # then it is what comes next
        expected = [(0, 3 * size), (size, size)]
    assert asyncio.run(read()) == expected


@settings(deadline=None)
@given(st.integers(1, 8), st.integers(0, 40), st.booleans())
def test_what_nobody_reads_is_bounded_and_said(size, top, logprobs):
    async def fill() -> None:
        inbox, turns, limit = Inbox(300), Turns(), 300
        entry = tuple((i, -1.0) for i in range(top))
        weight = size * (2 + top) if logprobs else size
        taken = 0
        while True:
            ids = tuple(range(taken, taken + size))
            logs = tuple(TokenLogprob(i, -1.0, 1, entry) for i in ids) if logprobs else ()
            if not inbox.stash(TokenDelta("h", taken, ids, logs), turns):
                break
            taken += size
            held = sum(len(e.delta().token_ids) if not isinstance(e, DecodeTokens) else size for e in inbox._events)
            assert held == taken
        assert taken // size == limit // weight
        assert not inbox.stash(delta_at(taken + size, 1, False, True), turns)
        inbox.put_nowait(TimeUp(None))
        event = await inbox.get()
        assert isinstance(event, TimeUp)
        assert "not read" in event.error.message
        assert not inbox._events

    asyncio.run(fill())


def test_an_event_is_never_larger_than_a_slow_client_takes_at_once():
    async def read() -> list[int]:
        inbox, turns = Inbox(), Turns()
        for index in range(3 * MAX_EVENT + 1):
            inbox.stash(delta_at(index, 1, False, index == 3 * MAX_EVENT), turns)
        return [len((await inbox.get()).delta.token_ids) for _ in range(4)]

    assert asyncio.run(read()) == [MAX_EVENT, MAX_EVENT, MAX_EVENT, 1]
