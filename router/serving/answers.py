"""The answers to one request: n continuations of each of its prompts, which is computed once.

    first  ──▶ piece, piece, … , piece(ending)            alone until its prompt's KV is in the prefix caches of its workers:
                                                          the commit, or its first token where one worker runs all of it
    others      └── start ──▶ piece, … , piece(ending)    then beside it, on the same workers where those have room

A continuation after the first recomputes at most the prompt's last block; where its workers differ, or have forgotten the
prompt, it computes more and answers the same. Prompts do not wait for each other. Each has a seed of its own, `derived_seed`,
the first the request's: it gives the answer that n = 1 would. The first error of any ends all. Pieces of one answer are in
order, and nobody's next piece is made before the last one was taken. Does not know fronts, permits or workers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

from contracts.clock import Clock
from contracts.request import FinishReason, TokenDelta
from contracts.sampling import MAX_SEED
from observability.metrics import RouterMetrics
from observability.stages import Spent, StageTimes
from router.exchange import Ask, Ending, Piece, Usage
from router.serving.flow import Flow
from router.serving.progress import Job, Progress
from router.text.tokenizer import Tokenizer
from router.text.wording import Said, Wording

_SEED_STRIDE = 0x4F1B_BCDC_BFA5_3E0B  # 2**63 over the golden ratio, made odd

_NOTHING = Said("", (), ())


def derived_seed(seed: int, index: int) -> int:
    """The seed of answer `index` of a request: (seed + index * stride) mod 2**63, so that answer 0 has the request's own.

    The stride is odd, so no two of a request are equal; it is 2**63 over the golden ratio, so the seeds of requests whose
    own seeds are near each other (1, 2, 3, …) stay far apart for every index.
    """
    return (seed + index * _SEED_STRIDE) & MAX_SEED


@dataclass(slots=True)
class Times:
    """Instants of one answer on the router's clock."""

    arrived: float
    received: float  # all of it, and it is understood
    admitted: float | None = None
    tokenised: float | None = None
    first_heard: float | None = None
    first_given: float | None = None
    second_given: float | None = None
    last_given: float | None = None

    @property
    def gap_s(self) -> float | None:
        """Between giving the first token and the second, in seconds; None where there was no second."""
        given = self.first_given, self.second_given
        return None if given[0] is None or given[1] is None else given[1] - given[0]


@dataclass(frozen=True, slots=True)
class Making:
    """What every answer is made with."""

    tokenizer: Tokenizer
    flow: Flow
    clock: Clock
    metrics: RouterMetrics


class Answer:
    """One answer. `pieces` may be used once."""

    def __init__(self, index: int, ask: Ask, progress: Progress, times: Times, making: Making) -> None:
        assert times.admitted is not None
        assert times.tokenised is not None
        progress.stages = StageTimes(
            receive_s=times.received - times.arrived,
            admission_s=times.admitted - times.received,
            tokenise_s=times.tokenised - times.admitted,
        )
        progress.began_at = times.tokenised
        self.index = index
        self.progress = progress
        self.times = times
        self.num_tokens = 0  # that were given
        self._prompt_only = ask.prompt_only
        self._making = making
        text = making.tokenizer.text_stream(ask.skip_special_tokens, ask.marks)
        self._wording = Wording(text, ask.stop, ask.include_stop, ask.sampling.min_tokens)

    async def pieces(self, usage: Callable[[], Usage] | None = None) -> AsyncGenerator[Piece, None]:
        """Choose and run are the flow's; here its tokens become pieces. `usage` is asked for the last of them, if it is there."""
        times, clock = self.times, self._making.clock
        async with aclosing(self._making.flow.deltas(self.progress)) as deltas:
            async for delta in deltas:
                now = clock.now()
                said = _NOTHING if self._prompt_only else self._wording.feed(delta)
                self.num_tokens += len(said.token_ids)
                first = times.first_heard is None
                if first:
                    times.first_heard = heard = self.progress.heard_at[0] if self.progress.heard_at else now
                elif said.token_ids and times.last_given is not None:
                    self._making.metrics.tokens_delivered(now - times.last_given, len(said.token_ids))
                times.last_given = now
                ending = self._ending(delta, said)
                piece = Piece(
                    said.text,
                    said.token_ids,
                    said.logprobs,
                    self.progress.job.prompt_token_ids if first else (),
                    delta.prompt_logprobs,
                    ending,
                    self.index,
                    usage() if usage is not None and ending is not None else None,
                )
                yield piece
                if first:  # the front has written it when it asks for more
                    times.first_given = clock.now()
                    self.progress.stages = replace(self.progress.stages, emit_s=times.first_given - heard)
                elif times.second_given is None and len(self.progress.heard_at) > 1:
                    times.second_given = clock.now()
                if ending is not None:
                    return

    def _ending(self, delta: TokenDelta, said: Said) -> Ending | None:
        if said.stop is None and delta.finish_reason is None:
            return None
        if self._prompt_only:  # it is as long as was asked for, whatever the token was
            return self._ended(FinishReason.LENGTH, None)
        reason = FinishReason.STOP if said.stop is not None else delta.finish_reason
        assert reason is not None
        stop = said.stop if said.stop is not None else delta.stop_token_id
        return self._ended(reason, stop)

    def _ended(self, reason: FinishReason, stop: str | int | None) -> Ending:
        progress = self.progress
        return Ending(reason, stop, self.spent, progress.handoff, progress.route, progress.decision)

    @property
    def spent(self) -> Spent:
        """Where its time went so far. A token that is being given is given now."""
        times, now = self.times, self._making.clock.now()
        if times.first_heard is None:
            return Spent(self.progress.stages)
        first = now if times.first_given is None else times.first_given
        second = now if times.second_given is None and len(self.progress.heard_at) > 1 else times.second_given
        gap_s = None if second is None else second - first
        if times.first_given is None:
            self.progress.stages = replace(self.progress.stages, emit_s=first - times.first_heard)
        return Spent(self.progress.timed(gap_s), first - times.arrived, gap_s)


class Answers:
    """All answers of one request, to each of its prompts. `pieces` may be used once."""

    def __init__(self, ask: Ask, jobs: Sequence[Job], times: Times, making: Making) -> None:
        """A job for each prompt. `times` become those of the first answer; it has arrived, was admitted and is tokenised."""
        self._firsts: list[Answer] = []  # of each prompt
        self.all: list[Answer] = []  # in the order of their index
        for job in jobs:
            for index in range(ask.n):
                first = None if index == 0 else self._firsts[-1].progress
                progress = making.flow.start(_nth(job, index, len(self.all), seeded=ask.seeded), beside=first)
                own = replace(times) if self.all else times
                answer = Answer(len(self.all), ask, progress, own, making)
                self.all.append(answer)
                if first is None:
                    self._firsts.append(answer)

    @property
    def first(self) -> Answer:
        """The one with index 0."""
        return self.all[0]

    @property
    def usage(self) -> Usage:
        """Each prompt counted once, and what was given of all answers."""
        num_given = sum(answer.num_tokens for answer in self.all)
        num_cached = sum(answer.progress.num_cached_tokens for answer in self._firsts)
        return Usage(self._num_prompt_tokens, num_given, num_cached)

    @property
    def took(self) -> tuple[int, int]:
        """Tokens that came of it so far: of the prompts, once something is made, and of all answers together."""
        made = sum(len(answer.progress.token_ids) for answer in self.all)
        return self._num_prompt_tokens if made else 0, made

    @property
    def _num_prompt_tokens(self) -> int:
        return sum(len(answer.progress.job.prompt_token_ids) for answer in self._firsts)

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of all answers as they come; the last of them has the usage. Close it to cancel everything at once."""
        return self._together() if len(self.all) > 1 else self.first.pieces(lambda: self.usage)

    async def _together(self) -> AsyncGenerator[Piece, None]:
        made: asyncio.Queue[_Made | Exception] = asyncio.Queue()
        tasks = [asyncio.ensure_future(_make(answer, made)) for answer in self.all]
        num_running = len(tasks)
        try:
            while num_running:
                news = await made.get()
                if isinstance(news, Exception):
                    raise news
                if news.piece.ending is not None:
                    num_running -= 1
                yield news.piece if num_running else replace(news.piece, usage=self.usage)
                news.taken.set()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)


@dataclass(frozen=True, slots=True)
class _Made:
    """A piece that waits to be taken."""

    piece: Piece
    taken: asyncio.Event


async def _make(answer: Answer, made: asyncio.Queue[_Made | Exception]) -> None:
    """Run one answer; one that is not its prompt's first begins when that prompt is cached."""
    try:
        beside = answer.progress.beside
        if beside is not None:
            await beside.prompt_cached.wait()
        async with aclosing(answer.pieces()) as pieces:
            async for piece in pieces:
                if piece.ending is not None:  # it may have ended at its first token, and was handed to nobody
                    answer.progress.prompt_cached.set()
                taken = asyncio.Event()
                made.put_nowait(_Made(piece, taken))
                await taken.wait()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is raised to whoever reads the answers
        made.put_nowait(error)


def _nth(job: Job, index: int, index_of_all: int, *, seeded: bool) -> Job:
    """The job of answer `index` to its prompt. The prompt's log-probabilities come with the first: only computing gives them."""
    if index_of_all == 0:
        return job
    sampling = replace(job.sampling, seed=derived_seed(job.sampling.seed, index if seeded else index_of_all))
    return replace(job, sampling=sampling if index == 0 else replace(sampling, prompt_logprobs=None))
