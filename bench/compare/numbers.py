"""What a cell comes to, and who is better at it.

    CellRun ──numbers──▶ {measure: value} a round ──medians──▶ best of the systems, or nobody's when they are within EVEN

Does not know how a load was sent.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from bench.compare.load import Cell, CellRun
from bench.serving.measures import Limits
from bench.stats import percentile

EVEN = 1.10


@dataclass(frozen=True, slots=True)
class Quantity:
    """One thing that is compared."""

    key: str
    title: str
    unit: str
    lower_is_better: bool = True


QUANTITIES = (
    Quantity("stream_itl_p99", "ITL of streams p99", "ms"),
    Quantity("stream_itl_max", "ITL of streams longest", "ms"),
    Quantity("stream_itl_p50", "ITL of streams p50", "ms"),
    Quantity("ttft_p50", "TTFT p50", "ms"),
    Quantity("ttft_p99", "TTFT p99", "ms"),
    Quantity("tpot_p50", "TPOT p50", "ms"),
    Quantity("tpot_p99", "TPOT p99", "ms"),
    Quantity("output_throughput", "output", "tokens/s", lower_is_better=False),
    Quantity("input_throughput", "prompts read", "tokens/s", lower_is_better=False),
    Quantity("goodput", "goodput", "prompts/s", lower_is_better=False),
    Quantity("stream_goodput", "stream tokens in time", "tokens/s", lower_is_better=False),
)
ITL_P99, ITL_MAX = QUANTITIES[0], QUANTITIES[1]
Numbers = Mapping[str, float]


def numbers(run: CellRun, limits: Limits) -> dict[str, float]:
    """Every quantity of one run; NaN where there was nothing to measure it by.

    Goodput is of prompts that kept all limits; a stream's token is in time when its gap kept the limit of TPOT.
    """
    gaps_s = stream_gaps_s(run)
    good = [outcome for outcome in run.prompts if outcome.ok]
    ttft_s = [outcome.ttft_s for outcome in good]
    tpot_s = [tpot for outcome in good if (tpot := outcome.tpot_s) is not None]
    window_s = run.end_s - run.begin_s
    last_s = max([run.end_s, *(outcome.answered.arrivals_s[-1] for outcome in good)])
    most_gap_s = dict(limits.most_ms).get("tpot", math.inf) / 1e3
    return {
        "stream_itl_p99": _percentile_ms(gaps_s, 99),
        "stream_itl_max": _percentile_ms(gaps_s, 100),
        "stream_itl_p50": _percentile_ms(gaps_s, 50),
        "ttft_p50": _percentile_ms(ttft_s, 50),
        "ttft_p99": _percentile_ms(ttft_s, 99),
        "tpot_p50": _percentile_ms(tpot_s, 50),
        "tpot_p99": _percentile_ms(tpot_s, 99),
        "output_throughput": _tokens_in_window(run) / window_s,
        "input_throughput": sum(outcome.prompt_len for outcome in good) / (last_s - run.begin_s),
        "goodput": sum(limits.met_by(outcome) for outcome in good) / (last_s - run.begin_s),
        "stream_goodput": sum(gap_s <= most_gap_s for gap_s in gaps_s) / window_s,
    }


def stream_gaps_s(run: CellRun) -> list[float]:
    """The gaps of all streams that begin in the window, however late they end."""
    return [
        later - earlier
        for answer in run.streams
        for earlier, later in pairwise(answer.arrivals_s)
        if run.begin_s <= earlier < run.end_s
    ]


def _tokens_in_window(run: CellRun) -> float:
    """Of streams and prompts; an event of an answer counts as its share of the answer's tokens."""
    total = 0.0
    for answer in run.streams:
        for at_s, count in zip(answer.arrivals_s, answer.counts, strict=True):
            total += count if run.begin_s <= at_s < run.end_s else 0
    for outcome in run.prompts:
        if outcome.ok:
            times = outcome.answered.arrivals_s
            inside = sum(run.begin_s <= at_s < run.end_s for at_s in times)
            total += outcome.output_len * inside / len(times)
    return total


def _percentile_ms(values_s: Sequence[float], q: float) -> float:
    return percentile(values_s, q) * 1e3 if values_s else math.nan


def best(values: Mapping[str, float], quantity: Quantity) -> str | None:
    """The system with the best value; None when the next one is within EVEN of it, or nothing was measured."""
    known = {name: value for name, value in values.items() if not math.isnan(value)}
    if len(known) < 2:
        return None
    ordered = sorted(known, key=known.__getitem__, reverse=not quantity.lower_is_better)
    first, second = known[ordered[0]], known[ordered[1]]
    low, high = sorted((first, second))
    return ordered[0] if high > low * EVEN else None


@dataclass(frozen=True, slots=True)
class Differences:
    """How many token ids were compared between two systems, how many were not the same, and in how many answers."""

    compared: int = 0
    differing: int = 0
    answers: int = 0

    def __add__(self, other: Differences) -> Differences:
        return Differences(
            self.compared + other.compared, self.differing + other.differing, self.answers + other.answers
        )


def differences(one: CellRun, other: CellRun) -> Differences:
    """Token by token, each answer with its twin: as far as both of a stream's go, and prompts' answers to their ends."""
    total = Differences()
    theirs = {answer.place: answer.token_ids for answer in other.streams}
    pairs = [(answer.token_ids, theirs.get(answer.place, ())) for answer in one.streams]
    for ours, twin in pairs:
        shared = min(len(ours), len(twin))
        total += _differing(ours[:shared], twin[:shared])
    for left, right in zip(one.prompts, other.prompts, strict=True):
        if left.ok and right.ok:
            total += _differing(left.answered.token_ids, right.answered.token_ids)
    return total


def _differing(ours: Sequence[int], theirs: Sequence[int]) -> Differences:
    shared = min(len(ours), len(theirs))
    wrong = sum(a != b for a, b in zip(ours, theirs, strict=False)) + max(len(ours), len(theirs)) - shared
    return Differences(max(len(ours), len(theirs)), wrong, int(wrong > 0))


@dataclass(frozen=True, slots=True)
class Comparison:
    """All that was measured: of each cell, system and round the numbers; and the tokens compared with the first system's."""

    systems: tuple[str, ...]
    cells: tuple[Cell, ...]
    rounds: Mapping[tuple[Cell, str], tuple[Numbers, ...]]
    tokens: Differences
    failed: Mapping[str, int]
    over_two: Mapping[str, str]  # of each system, how many prompts of how many went over two pools

    def runs(self, cell: Cell, system: str, quantity: Quantity) -> tuple[float, ...]:
        """A quantity of every round in which it could be measured."""
        values = (numbers[quantity.key] for numbers in self.rounds[cell, system])
        return tuple(value for value in values if not math.isnan(value))

    def median(self, cell: Cell, system: str, quantity: Quantity) -> float:
        """Over the rounds; NaN for nothing."""
        runs = self.runs(cell, system, quantity)
        return statistics.median(runs) if runs else math.nan

    def medians(self, cell: Cell, quantity: Quantity) -> dict[str, float]:
        """Of every system."""
        return {system: self.median(cell, system, quantity) for system in self.systems}

    def winner(self, cell: Cell, quantity: Quantity) -> str | None:
        """See `best`."""
        return best(self.medians(cell, quantity), quantity)
