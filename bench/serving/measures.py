"""What a load is summed up in: the fields of vLLM's `bench serve`, by its names, so that its readers read ours.

    {mean,median,std,p<q>}_{ttft,tpot,itl,e2el}_ms    milliseconds; TTFT and E2EL from the scheduled time
    request_throughput, output_throughput, total_token_throughput, request_goodput        per second
    ttfts, itls (seconds), input_lens, output_lens, errors                                one entry a request

Does not know how they were measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from bench.serving.drive import LoadRun
from bench.serving.requests import Outcome
from contracts.errors import ConfigError

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
JsonObject = dict[str, Json]
METRICS = ("ttft", "tpot", "itl", "e2el")
GOODPUT_METRICS = ("ttft", "tpot", "e2el")


@dataclass(frozen=True, slots=True)
class Limits:
    """The service that a good request got, in milliseconds, by name (`GOODPUT_METRICS`); empty: not asked for."""

    most_ms: tuple[tuple[str, float], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.most_ms)

    def met_by(self, outcome: Outcome) -> bool:
        """Whether this request kept every limit. One token has no TPOT, and keeps it."""
        if not outcome.ok:
            return False
        took_s = {"ttft": outcome.ttft_s, "tpot": outcome.tpot_s or 0.0, "e2el": outcome.e2el_s}
        return all(took_s[name] * 1e3 <= most_ms for name, most_ms in self.most_ms)


def parse_limits(texts: Sequence[str]) -> Limits:
    """Limits of `ttft:200`, `tpot:50` … (milliseconds). Raises ConfigError."""
    found: dict[str, float] = {}
    for text in texts:
        name, _, value = text.partition(":")
        try:
            most_ms = float(value)
        except ValueError:
            most_ms = -1.0
        if name not in GOODPUT_METRICS or not 0 < most_ms < float("inf"):
            allowed = ", ".join(f"{each}:MS" for each in GOODPUT_METRICS)
            raise ConfigError(f"--goodput: {text!r} must be one of {allowed}, with MS above 0")
        if name in found:
            raise ConfigError(f"--goodput: {name!r} is given twice")
        found[name] = most_ms
    return Limits(tuple(found.items()))


def measure(run: LoadRun, limits: Limits = Limits(), percentiles: Sequence[float] = (90.0, 99.0)) -> JsonObject:
    """The fields above, None for a statistic of nothing. Of failed requests only the count and the errors are in it."""
    good = [outcome for outcome in run.outcomes if outcome.ok]
    took_s = max(run.duration_s, 1e-9)
    total_input = sum(outcome.prompt_len for outcome in good)
    total_output = sum(outcome.output_len for outcome in good)
    met = sum(limits.met_by(outcome) for outcome in good)
    fields: JsonObject = {
        "duration": run.duration_s,
        "completed": len(good),
        "failed": len(run.outcomes) - len(good),
        "total_input_tokens": total_input,
        "total_output_tokens": total_output,
        "request_throughput": len(good) / took_s,
        "request_goodput": met / took_s if limits else None,
        "output_throughput": total_output / took_s,
        "total_token_throughput": (total_input + total_output) / took_s,
        "max_output_tokens_per_s": busiest_second(good, run.begin_s),
        "max_concurrent_requests": most_at_once(good),
    }
    samples = {
        "ttft": [outcome.ttft_s for outcome in good],
        "tpot": [tpot for outcome in good if (tpot := outcome.tpot_s) is not None],
        "itl": [gap for outcome in good for gap in outcome.itl_s],
        "e2el": [outcome.e2el_s for outcome in good],
        "send_lag": [outcome.lag_s for outcome in good],
    }
    for name, values in samples.items():
        fields |= _summary(name, values, percentiles)
    return fields


def details(run: LoadRun) -> JsonObject:
    """One entry a request, failed ones with zeros: what `--save-detailed` adds."""
    every = run.outcomes
    return {
        "input_lens": [outcome.prompt_len for outcome in every],
        "output_lens": [outcome.output_len if outcome.ok else 0 for outcome in every],
        "ttfts": [outcome.ttft_s if outcome.ok else 0.0 for outcome in every],
        "itls": [[*outcome.itl_s] if outcome.ok else [] for outcome in every],
        "e2els": [outcome.e2el_s if outcome.ok else 0.0 for outcome in every],
        "start_times": [outcome.scheduled_s - run.begin_s for outcome in every],
        "generated_texts": [outcome.answered.text if outcome.ok else "" for outcome in every],
        "errors": [outcome.error for outcome in every],
    }


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """The most requests that were under way at one moment, sent and not yet answered."""
    steps = [(outcome.answered.sent_s, 1) for outcome in outcomes]
    steps += [(outcome.answered.arrivals_s[-1], -1) for outcome in outcomes]
    now = most = 0
    for _, step in sorted(steps):
        now += step
        most = max(most, now)
    return most


def busiest_second(outcomes: Sequence[Outcome], begin_s: float) -> float:
    """The most tokens that came within one whole second from `begin_s`; an event has its share of its answer's tokens."""
    if not outcomes:
        return 0.0
    seconds = [int(at_s - begin_s) for outcome in outcomes for at_s in outcome.answered.arrivals_s]
    shares = [
        outcome.output_len / len(outcome.answered.arrivals_s)
        for outcome in outcomes
        for _ in outcome.answered.arrivals_s
    ]
    return float(np.bincount(seconds, weights=shares).max())


def percentile_name(q: float) -> str:
    """p99 of 99.0, p99.9 of 99.9."""
    return f"p{q:g}"


def _summary(name: str, values_s: Sequence[float], percentiles: Sequence[float]) -> JsonObject:
    names = [f"{start}_{name}_ms" for start in ("mean", "median", "std", *map(percentile_name, percentiles))]
    if not values_s:
        return dict.fromkeys(names)  # vLLM's tool says 0, as if it had been measured
    values = np.asarray(values_s) * 1e3
    found = (values.mean(), np.median(values), values.std(), *np.percentile(values, percentiles))
    return {each: float(value) for each, value in zip(names, found, strict=True)}
