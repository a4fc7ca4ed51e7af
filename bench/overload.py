"""What a router is worth when more is asked of it than it can do: goodput from half to three times its capacity.

    paced fake workers, or a real model on this machine ──▶ router ◀── an open loop of users, each with a deadline
        capacity: requests per second that a closed loop gets, as many in flight as the router runs at once

Goodput counts answers that were whole and in time. A refused request must have got 429 and a time to come back, a late one must
have heard that it is late; one that ends no way, after its own time and ten seconds more, hangs. With fake workers a place takes
a known time, so that the router is what is measured; with the real model the workers are, and the router lets in what they say
that they run at once. Where clients say no time they want theirs all the same, and the router has --max-wait to keep it.
Does not know how a router decides.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.cluster import serving, vocab_size_of
from bench.load import LoadFailed
from bench.overload_client import OfferedAnswer, OfferedLoad, run_offered
from bench.progress import Say
from bench.report import Measure, Report, Table, Verdict
from bench.router_cluster import SERVED_NAME, RoutedConfig, routed
from bench.stats import percentile

GOODPUT_BAR = 0.9  # at three times capacity, of its peak
_REFUSED, _OK = 429, 200
_TIMED_OUT, _LATE = 408, "request_timeout"


@dataclass(frozen=True, slots=True)
class OverloadWorld:
    """One setting. `deadline_factor` is a request's time in times of what it takes when as many run as may.

    `at_once` answers are made at once: that is told fake workers' router, and to a real worker; its router learns it from that.
    """

    name: str
    at_once: int
    prompt_tokens: int
    max_tokens: int
    duration_s: float
    step_s: float | None = None  # of fake workers; None is the real model
    deadline_factor: float = 4.0
    says_time: bool = True
    max_wait_s: float | None = None  # of the router; None is its default


@dataclass(frozen=True, slots=True)
class OverloadBenchConfig:
    """Loads in times of capacity; each is offered `rounds` times."""

    loads: tuple[float, ...] = (0.5, 1.0, 1.5, 2.0, 3.0)
    rounds: int = 3
    worlds: tuple[OverloadWorld, ...] = (
        OverloadWorld("fake workers", 32, prompt_tokens=32, max_tokens=25, duration_s=10.0, step_s=0.02),
        OverloadWorld("no time said", 32, 32, 25, duration_s=10.0, step_s=0.02, says_time=False, max_wait_s=1.0),
        OverloadWorld("real model", 8, prompt_tokens=32, max_tokens=8, duration_s=25.0),
    )


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a closed loop got: requests per second, and how long each took."""

    rate: float
    service_s: float


@dataclass(frozen=True, slots=True)
class Offered:
    """One run at one load."""

    goodput: float  # requests per second
    num_offered: int
    num_refused: int
    num_late: int  # 408, or the stream's last word was that, or all of it came too late
    num_hung: int
    num_unexplained: int  # refused without 429 and Retry-After, or failed, or broke off
    ttft_s: tuple[float, ...]  # of those in time
    retry_after_s: tuple[int, ...]


def judged(answers: Sequence[OfferedAnswer], timeout_s: float, duration_s: float) -> Offered:
    """What came of a run of open loop. What ends after the load has ended is no goodput: it was served while nobody asked."""
    whole = [a for a in answers if a.status == _OK and a.whole]
    good = [a for a in whole if a.end_s <= timeout_s]
    refused = [a for a in answers if a.status == _REFUSED]
    told_late = sum(a.status == _TIMED_OUT or (a.status == _OK and not a.whole and a.error == _LATE) for a in answers)
    num_late = told_late + len(whole) - len(good)
    hung = [a for a in answers if a.status == 0 and a.end_s > timeout_s]
    told = [a.retry_after_s for a in refused if a.retry_after_s is not None]
    return Offered(
        goodput=sum(a.sent_s + a.end_s <= duration_s for a in good) / duration_s,
        num_offered=len(answers),
        num_refused=len(refused),
        num_late=num_late,
        num_hung=len(hung),
        num_unexplained=len(answers) - len(good) - len(told) - num_late - len(hung),
        ttft_s=tuple(a.first_s for a in good),
        retry_after_s=tuple(told),
    )


def run_overload(model: Path, config: OverloadBenchConfig, say: Say) -> Report:
    """Every world, each load in every round."""
    found: dict[str, dict[float, list[Offered]]] = {}
    capacities: dict[str, Capacity] = {}
    for world in config.worlds:
        say(f"overload: {world.name}: starting")
        capacities[world.name], found[world.name] = _in_world(model, world, config, say)
    return overload_report(config, capacities, found)


def _in_world(
    model: Path, world: OverloadWorld, config: OverloadBenchConfig, say: Say
) -> tuple[Capacity, dict[float, list[Offered]]]:
    vocab_size, flags = vocab_size_of(model), _flags("--max-wait", world.max_wait_s)
    if world.step_s is not None:
        with routed(model, RoutedConfig(step_s=world.step_s, max_running=world.at_once, router_flags=flags)) as fakes:
            return _measured(fakes.http_port, SERVED_NAME, vocab_size, (world, config), say)
    with serving(model, router_flags=flags, worker_flags=_flags("--max-num-seqs", world.at_once)) as cluster:
        port = int(cluster.http.rpartition(":")[2])
        return _measured(port, cluster.model, vocab_size, (world, config), say)


def _flags(name: str, value: float | None) -> tuple[str, ...]:
    return () if value is None else (name, str(value))


def _measured(
    port: int, model: str, vocab_size: int, sizes: tuple[OverloadWorld, OverloadBenchConfig], say: Say
) -> tuple[Capacity, dict[float, list[Offered]]]:
    world, config = sizes
    seeds = itertools.count()

    def load(rate: float, timeout_s: float | None) -> OfferedLoad:
        return OfferedLoad(
            port=port,
            model=model,
            prompt_tokens=world.prompt_tokens,
            max_tokens=world.max_tokens,
            vocab_size=vocab_size,
            duration_s=world.duration_s,
            rate=rate,
            concurrency=0 if rate else world.at_once,
            timeout_s=timeout_s,
            says_time=world.says_time,
            seed=next(seeds),
        )

    capacity = _capacity(lambda: run_offered(load(0.0, None)), world)
    timeout_s = world.deadline_factor * capacity.service_s
    say(f"overload: {world.name}: {capacity.rate:.1f} requests/s, {capacity.service_s:.2f} s each")
    runs: dict[float, list[Offered]] = {factor: [] for factor in config.loads}
    for number in range(config.rounds):
        for factor in config.loads:
            answers = run_offered(load(factor * capacity.rate, timeout_s))
            runs[factor].append(judged(answers, timeout_s, world.duration_s))
            say(f"overload: {world.name}: round {number + 1}, load {factor:g}: {runs[factor][-1].goodput:.1f} good/s")
    return capacity, runs


def _capacity(run: Callable[[], Sequence[OfferedAnswer]], world: OverloadWorld) -> Capacity:
    """Of the middle of a closed loop's run, when all of it is busy. Raises LoadFailed when anything was refused."""
    answers = run()
    if any(not a.whole for a in answers):
        raise LoadFailed(f"{world.name}: a closed loop of {world.at_once} was not served")
    ends = sorted(a.sent_s + a.end_s for a in answers)
    busy = [end for end in ends if ends[0] <= end <= world.duration_s]
    if len(busy) <= world.at_once:
        raise LoadFailed(f"{world.name}: {world.duration_s:g} s are too short")
    return Capacity((len(busy) - 1) / (busy[-1] - busy[0]), median(a.end_s for a in answers))


def overload_report(
    config: OverloadBenchConfig, capacities: dict[str, Capacity], found: dict[str, dict[float, list[Offered]]]
) -> Report:
    """Goodput by load, its bar, and that nothing hung or was refused without a word."""
    measures, verdicts, tables = [], [], []
    for world in config.worlds:
        runs, capacity = found[world.name], capacities[world.name]
        goodput = {factor: median(run.goodput for run in runs[factor]) for factor in config.loads}
        everything = [run for at_load in runs.values() for run in at_load]
        measures += [
            Measure(
                f"{world.name}: goodput at {factor:g} × capacity", "requests/s", tuple(r.goodput for r in runs[factor])
            )
            for factor in config.loads
        ]
        share = goodput[max(config.loads)] / max(goodput.values())
        verdicts += [
            Verdict(
                f"{world.name}: goodput at {max(config.loads):g} × capacity, of its peak", share, "", GOODPUT_BAR, True
            ),
            Verdict(f"{world.name}: requests that hung", sum(r.num_hung for r in everything), "", 0, False),
            Verdict(
                f"{world.name}: neither served, nor 429 with Retry-After, nor late",
                sum(r.num_unexplained for r in everything),
                "",
                0,
                False,
            ),
        ]
        title = f"{world.name}: capacity {capacity.rate:.1f} requests/s, {capacity.service_s:.2f} s each"
        tables.append(Table(title, _COLUMNS, tuple(_row(factor, runs[factor]) for factor in config.loads)))
    return Report(
        name="overload",
        title="Goodput when more is asked than there is",
        command="python -m bench overload",
        method=(
            "An open loop of requests at random times, each with a deadline of four times what it takes when the router is "
            "full, which it says (X-Request-Timeout) but for the world that has its name from that; goodput is answers that "
            "were whole within it. Capacity is what a closed loop gets. Medians of the rounds."
        ),
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        tables=tuple(tables),
    )


_COLUMNS = ("load", "offered", "refused", "late", "goodput/s", "TTFT p50 s", "TTFT p99 s", "Retry-After s")


def _row(factor: float, runs: Sequence[Offered]) -> tuple[str, ...]:
    counts = Counter[str]()
    for run in runs:
        counts.update(offered=run.num_offered, refused=run.num_refused, late=run.num_late)
    ttft = sorted(t for run in runs for t in run.ttft_s)
    told = sorted(t for run in runs for t in run.retry_after_s)
    return (
        f"{factor:g}",
        str(counts["offered"]),
        str(counts["refused"]),
        str(counts["late"]),
        f"{median(run.goodput for run in runs):.1f}",
        f"{percentile(ttft, 50):.2f}" if ttft else "–",
        f"{percentile(ttft, 99):.2f}" if ttft else "–",
        f"{told[0]} to {told[-1]}" if told else "–",
    )
