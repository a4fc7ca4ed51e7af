"""What one request came to: told of it as it goes, and written once, to the metrics and in one line of the log.

    CANCELLED ──ended──▶ why the last answer ended          ──failed──▶ the code of the error

A request of which neither is said was left by its client. Does not know how answers are made.
"""

from __future__ import annotations

from contracts.errors import DiptychError, ErrorCode, RateLimited
from contracts.request import FinishReason
from contracts.worker import WorkerKind
from dashboard.requests import Finished
from observability.log import Log
from observability.metrics import RequestSample, RouterMetrics
from observability.stages import StageTimes
from router.exchange import Ask
from router.serving.answers import Answers, Times

_PREFILL, _DECODE = WorkerKind.PREFILL, WorkerKind.DECODE
_SUCCESSES = frozenset((FinishReason.STOP.value, FinishReason.LENGTH.value))
_THEIRS = frozenset((ErrorCode.CANCELLED, ErrorCode.INVALID_ARGUMENT, ErrorCode.NOT_FOUND, ErrorCode.PERMISSION_DENIED))


class Account:
    """Of one request. `answers` are set once they are begun."""

    def __init__(self, ask: Ask, now: float) -> None:
        """It is here and understood at that instant of the router's clock, which is that of all `times`."""
        self.times = Times(now if ask.arrived is None else min(ask.arrived, now), now)
        self.answers: Answers | None = None
        self._ask = ask
        self._outcome = ErrorCode.CANCELLED.value
        self._excused = True  # until something else is said, its client has left

    def ended(self, reason: FinishReason) -> None:
        """The last answer did."""
        self._outcome, self._excused = reason.value, False

    def failed(self, error: DiptychError) -> None:
        """What the client hears instead, or behind what it has."""
        self._outcome = error.code.value
        self._excused = error.code in _THEIRS or isinstance(error, RateLimited)

    def write(self, now: float, metrics: RouterMetrics, log: Log) -> RequestSample:
        """It is over; what it came to."""
        sample = self._sample(now)
        metrics.request_finished(sample)
        ask = self._ask
        log.info(
            "request",
            **({"caller": ask.caller.name} if ask.caller.name else {}),
            request_id=ask.request_id,
            outcome=sample.outcome,
            route=sample.route,
            answers=ask.num_answers,
            prompt_tokens=sample.num_prompt_tokens,
            cached_tokens=sample.num_cached_tokens,
            output_tokens=sample.num_output_tokens,
            ttft_s=sample.ttft_s,
            e2e_s=sample.e2e_s,
            **self._where(),
            **self._way(),
        )
        return sample

    def told(self, now: float, sample: RequestSample) -> Finished:
        """What a dashboard shows of it: nothing of its words, nor whose they are."""
        request_id = self._ask.request_id
        if self.answers is None:
            return Finished(request_id, now, sample)
        progress = self.answers.first.progress
        prefill, decode, decision = progress.at.get(_PREFILL), progress.at.get(_DECODE), progress.decision
        return Finished(
            request_id,
            now,
            sample,
            prefill="" if prefill is None else prefill.worker_id,
            decode="" if decode is None else decode.worker_id,
            reason="" if decision is None else decision.reason.value,
            remote_s=None if decision is None else decision.predicted_remote_s,
            local_s=None if decision is None else decision.predicted_local_s,
            measured_s=None if decision is None else decision.measured_s,
            num_failures=progress.num_failures,
            num_moves=progress.num_moves,
        )

    def _sample(self, now: float) -> RequestSample:
        times, answers, outcome = self.times, self.answers, self._outcome
        if answers is None:
            took_s, excused = now - times.arrived, self._excused
            return RequestSample(outcome, False, "none", took_s, None, 0, 0, 0, 0, 0, StageTimes(), (), excused=excused)
        first = times.first_given if times.first_given is not None else times.first_heard
        progress, usage = answers.first.progress, answers.usage
        lengths = [len(answer.progress.token_ids) for answer in answers.all]
        return RequestSample(
            outcome=outcome,
            succeeded=outcome in _SUCCESSES,
            route=progress.route.value,
            e2e_s=now - times.arrived,
            ttft_s=None if first is None else first - times.arrived,
            num_prompt_tokens=usage.prompt_tokens,
            num_cached_tokens=usage.cached_tokens,
            num_output_tokens=sum(lengths),
            num_longest_tokens=max(lengths),
            max_tokens=progress.job.sampling.max_tokens,
            stages=progress.timed(times.gap_s),
            gap_s=times.gap_s,
            num_answers=self._ask.n,
            handoffs=tuple(c.progress.handoff for c in answers.all if c.progress.handoff is not None),
            num_failed_handoffs=sum(c.progress.num_handoff_failures for c in answers.all),
            excused=self._excused,
        )

    def _where(self) -> dict[str, str]:
        """The workers that the first answer last ran on."""
        if self.answers is None:
            return {}
        return {kind.value: ref.worker_id for kind, ref in self.answers.first.progress.at.items()}

    def _way(self) -> dict[str, str | float | None]:
        """Why the first answer went its way, and what the ways were predicted to cost and it did."""
        decision = None if self.answers is None else self.answers.first.progress.decision
        if decision is None:
            return {}
        return {
            "decision": decision.path.value,
            "reason": decision.reason.value,
            "predicted_remote_s": decision.predicted_remote_s,
            "predicted_local_s": decision.predicted_local_s,
            "measured_s": decision.measured_s,
            "regret_s": decision.regret_s,
        }
