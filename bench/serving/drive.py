"""Sends a load: each request at its time (open loop), or as soon as one of N before it has ended (closed loop).

    schedule given              at its time, whether others have ended or not; a limit of concurrency only delays it, and the delay
                                counts: latency is from the scheduled time (no coordinated omission)
    no schedule, a limit        a closed loop: scheduled is when a place became free
    no schedule, no limit       all at once

A turn that continues a conversation waits for the answer before it. Does not know protocols or statistics.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from bench.serving.requests import AskFailed, BenchRequest, Outcome, Prompt, Reply, Target, Turn

OnDone = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """How to send. `arrivals_s` has one time a request, None where nothing is scheduled."""

    arrivals_s: tuple[float, ...] | None = None
    max_concurrency: int | None = None
    request_timeout_s: float = 600.0


@dataclass(frozen=True, slots=True)
class LoadRun:
    """Every request's outcome, in the order of the requests, and when the load began and ended."""

    outcomes: tuple[Outcome, ...]
    begin_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        """From the first request's time to the last answer's end."""
        return self.end_s - self.begin_s


@dataclass(frozen=True, slots=True)
class _Ended:
    """A whole prompt, its answer and when it ended: what the next turn builds on."""

    prompt: Prompt
    outcome: Outcome
    at_s: float


class _Driver:
    """One load under way. Owns a future a request, by which later turns wait for earlier ones."""

    def __init__(self, requests: Sequence[BenchRequest], plan: LoadPlan, target: Target, on_done: OnDone) -> None:
        self._requests, self._plan, self._target, self._on_done = requests, plan, target, on_done
        limit = plan.max_concurrency
        self._slots: AbstractAsyncContextManager[None] = nullcontext() if limit is None else asyncio.Semaphore(limit)
        loop = asyncio.get_running_loop()
        self._ends: list[asyncio.Future[_Ended]] = [loop.create_future() for _ in requests]
        self._begin_s = time.monotonic()

    async def run(self) -> LoadRun:
        """All of it."""
        async with asyncio.TaskGroup() as group:
            for index in range(len(self._requests)):
                group.create_task(self._one(index))
        outcomes = tuple(end.result().outcome for end in self._ends)
        return LoadRun(outcomes, self._begin_s, time.monotonic())

    async def _one(self, index: int) -> None:
        request, prompt = self._requests[index], self._requests[index].prompt
        due_s = self._begin_s
        if self._plan.arrivals_s is not None:
            due_s += self._plan.arrivals_s[index]
            await _until(due_s)
        if request.after is not None:
            before = await asyncio.shield(self._ends[request.after])
            if before.outcome.reply is None:
                self._end(index, prompt, Outcome(due_s, 0, error="the turn before it failed"))
                return
            due_s = max(due_s, before.at_s + request.think_s)
            await _until(due_s)
            prompt = continued(before.prompt, before.outcome.reply, prompt)
        async with self._slots:
            if self._plan.arrivals_s is None and self._plan.max_concurrency is not None:
                due_s = time.monotonic()
            outcome = await self._ask(prompt, request, due_s)
        self._end(index, prompt, outcome)

    async def _ask(self, prompt: Prompt, request: BenchRequest, due_s: float) -> Outcome:
        limit_s = self._plan.request_timeout_s
        try:
            async with asyncio.timeout(limit_s):
                reply = await self._target.ask(prompt, request.output_len)
        except AskFailed as error:
            return Outcome(due_s, request.prompt_len, error=error.message)
        except TimeoutError:
            return Outcome(due_s, request.prompt_len, error=f"no end within {limit_s:g} s")
        return Outcome(due_s, reply.prompt_tokens or request.prompt_len, reply)

    def _end(self, index: int, prompt: Prompt, outcome: Outcome) -> None:
        self._ends[index].set_result(_Ended(prompt, outcome, time.monotonic()))
        self._on_done(outcome)


async def drive(
    requests: Sequence[BenchRequest], plan: LoadPlan, target: Target, on_done: OnDone = lambda _: None
) -> LoadRun:
    """Send `requests` by `plan`. What a request fails of is in its outcome; only faults of ours are raised."""
    return await _Driver(requests, plan, target, on_done).run()


async def warm_up(requests: Sequence[BenchRequest], count: int, target: Target, limit_s: float) -> None:
    """Ask `count` of the requests one by one, unmeasured, each for `limit_s` at most.

    Raises AskFailed: a server that refuses now will refuse later.
    """
    firsts = [request for request in requests if request.after is None]
    for number in range(count):
        request = firsts[number % len(firsts)]
        try:
            async with asyncio.timeout(limit_s):
                await target.ask(request.prompt, request.output_len)
        except TimeoutError as error:
            raise AskFailed(f"no end of a request to warm up within {limit_s:g} s") from error


def continued(before: Prompt, reply: Reply, new: Prompt) -> Prompt:
    """The prompt before, its answer, and what is new, in one form. Raises AskFailed where the answer is not in that form."""
    if isinstance(before, str) and isinstance(new, str):
        return before + reply.text + new
    if isinstance(before, str) or isinstance(new, str):
        raise AskFailed("turns of a conversation must have one form")
    if new and isinstance(new[0], Turn):
        return (*before, Turn("assistant", reply.text), *new)
    if not reply.token_ids:
        raise AskFailed("the answer has no token ids to continue from")
    return (*before, *reply.token_ids, *new)


def with_times(requests: Sequence[BenchRequest], speed: float) -> tuple[float, ...] | None:
    """The times that the data give, `speed` times faster; None where they give none."""
    times = [request.at_s for request in requests]
    return None if None in times else tuple(at_s / speed for at_s in times if at_s is not None)


async def _until(due_s: float) -> None:
    """Never before: uvloop's timers count whole milliseconds, and what is sent too early seems to be answered too fast."""
    while (remaining_s := due_s - time.monotonic()) > 0:
        await asyncio.sleep(remaining_s)
