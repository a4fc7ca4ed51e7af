"""What router and workers add to a streamed token: 32 streams through the cluster against the engine alone at batch 32.

    engine alone   |step|step|step|                      this process, as many threads as the decode worker
    served         |step|·|step|·|step|·                 the gap between a stream's tokens, while all 32 streams stream

    added to each token = served gap - engine's step = (served gap - its own step) + (its own step - engine's step alone)
                                                        between two steps            cores and locks shared with serving

The first part is of one run, so a machine that drifts does not touch it; the second compares runs, in turns. A step makes 32
tokens, so what serving costs per token made is a 32nd of what it adds to each stream's gap; both are reported, the bar is held
against the greater. The client is a process of its own on the same cores, and what it takes is in the served gap. Does not
know how the cluster works.
"""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.cluster import Look, ServedCluster
from bench.load import LoadFailed, LoadPlan, LoadRequest, Protocol, Route, run_load
from bench.ours import OurEngine
from bench.progress import Say
from bench.report import Measure, Report, Verdict, measure
from bench.stats import Spread, spread, steady_itl_s, steady_window_s
from bench.ttft import ORDINARY_FROM

ADDED_BAR_MS = 1.0


@dataclass(frozen=True, slots=True)
class StreamsBenchConfig:
    """Sizes in tokens. Served answers are longer than the engine's alone by what streams may lead others by at the start."""

    streams: int = 32
    rounds: int = 5
    prompt_tokens: int = 32
    alone_tokens: int = 128
    served_tokens: int = 192
    threads: int = 1
    scrape_s: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServedRound:
    """One run of all streams. All but TTFT is of the time in which all streamed: means of a stream's gap and of the decode
    worker's own step, CPU seconds per token by kind of process."""

    itl_s: float
    step_s: float
    ttft_s: float
    cpu_s_per_token: dict[str, float]


@dataclass(frozen=True, slots=True)
class AloneRound:
    """One run of the engine alone: the mean step at full batch, and its CPU seconds per token."""

    step_s: float
    cpu_s_per_token: float


@dataclass(frozen=True, slots=True)
class Pair:
    """A served run and the engine alone just before and just after it, so that a drift of the machine cancels."""

    served: ServedRound
    before: AloneRound
    after: AloneRound

    @property
    def alone_step_s(self) -> float:
        """The engine's step at the time of the served run."""
        return (self.before.step_s + self.after.step_s) / 2


def stream_prompts(config: StreamsBenchConfig, vocab_size: int, run: int) -> list[tuple[int, ...]]:
    """Prompts of one run, which no other run has."""
    rng = random.Random(f"{config.seed}-{run}")
    return [
        tuple(rng.randrange(ORDINARY_FROM, vocab_size) for _ in range(config.prompt_tokens))
        for _ in range(config.streams)
    ]


def alone_round(engine: OurEngine, prompts: list[tuple[int, ...]], config: StreamsBenchConfig) -> AloneRound:
    """All prompts at once through the engine in this process."""
    steps = engine.steps(prompts, config.alone_tokens)
    full = [i for i, step in enumerate(steps) if step.num_answers == step.num_tokens == config.streams]
    first, last = steps[full[0] - 1], steps[full[-1]]
    cpu_s = (last.cpu_s - first.cpu_s) / (len(full) * config.streams)
    return AloneRound((last.end_s - first.end_s) / len(full), cpu_s)


def served_round(
    cluster: ServedCluster, protocol: Protocol, prompts: list[tuple[int, ...]], config: StreamsBenchConfig
) -> ServedRound:
    """All streams at once over `protocol`."""
    way = Route.DISAGGREGATED if protocol is Protocol.GRPC else Route.ANY
    requests = tuple(LoadRequest(prompt, config.served_tokens, way) for prompt in prompts)
    address = cluster.grpc if protocol is Protocol.GRPC else cluster.http
    with Watch(cluster, config.scrape_s) as watch:
        answers = run_load(LoadPlan(protocol, address, cluster.model, config.streams, requests))
    times = [answer.times for answer in answers]
    try:
        itl_s, window_s = steady_itl_s(times), steady_window_s(times)
    except ValueError as error:
        raise LoadFailed(f"{protocol.value}: {error}") from error
    first, last = looks_inside(watch.seen, window_s)
    num_steps = last.num_steps - first.num_steps
    num_tokens = num_steps * config.streams
    return ServedRound(
        itl_s=itl_s,
        step_s=(last.step_s - first.step_s) / num_steps,
        ttft_s=sum(answer.times.ttft_s for answer in answers) / len(answers),
        cpu_s_per_token={kind: (last.cpu_s[kind] - first.cpu_s[kind]) / num_tokens for kind in last.cpu_s},
    )


class Watch:
    """Looks at the cluster's counters every `pause_s` while it is entered; `seen` has what it saw."""

    def __init__(self, cluster: ServedCluster, pause_s: float) -> None:
        self._cluster = cluster
        self._pause_s = pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.seen: list[Look] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.wait(self._pause_s):
            self.seen.append(self._cluster.look())


def looks_inside(seen: Sequence[Look], window_s: tuple[float, float]) -> tuple[Look, Look]:
    """The first and the last look inside the window. LoadFailed when no step lies between them."""
    begin, end = window_s
    inside = [look for look in seen if begin <= look.at_s <= end]
    if not inside or inside[0].num_steps == inside[-1].num_steps:
        raise LoadFailed("the streams ran side by side too briefly to look at the decode worker twice")
    return inside[0], inside[-1]


def run_streams(model: Path, cluster: ServedCluster, vocab_size: int, config: StreamsBenchConfig, say: Say) -> Report:
    """Engine alone and served in turns, over gRPC and SSE in turns; the first round does not count."""
    import torch

    from bench.ours import load_ours

    say("streams: loading the model for the engine alone")
    engine = load_ours(model, config.threads)
    torch.set_num_threads(config.threads)
    numbers = itertools.count()

    def prompts() -> list[tuple[int, ...]]:
        return stream_prompts(config, vocab_size, next(numbers))

    pairs: dict[Protocol, list[Pair]] = {protocol: [] for protocol in Protocol}
    for number in range(config.rounds + 1):
        say(f"streams: round {number} of {config.rounds}" if number else "streams: warming up")
        before = alone_round(engine, prompts(), config)
        for protocol in Protocol:
            served = served_round(cluster, protocol, prompts(), config)
            after = alone_round(engine, prompts(), config)
            if number:
                pairs[protocol].append(Pair(served, before, after))
            before = after
    return streams_report(pairs, cluster.model, config)


def streams_report(pairs: dict[Protocol, list[Pair]], model: str, config: StreamsBenchConfig) -> Report:
    """Added time per token over each protocol against the bar, its parts, and CPU per token of every process."""
    measures, verdicts = [], []
    for protocol, runs in pairs.items():
        added = spread([p.served.itl_s - p.alone_step_s for p in runs], 1e3)
        measures += _time_measures(protocol.value, runs, added, config)
        measures += _cpu_measures(protocol.value, runs)
        per_token = added.median / config.streams
        verdicts.append(Verdict(f"added per streamed token, {protocol.value}", per_token, "ms", ADDED_BAR_MS, False))
        strict = f"strictest reading: growth of each stream's gap, {protocol.value}"
        verdicts.append(Verdict(strict, added.median, "ms", ADDED_BAR_MS, False))
    return Report(
        name="streams",
        title=f"What serving adds to a token at {config.streams} streams",
        command=f"python -m bench streams --rounds {config.rounds}",
        method=f"{model}, {config.threads} thread a worker; {config.streams} prompts of {config.prompt_tokens} tokens, "
        f"{config.served_tokens} tokens each. Gap between a stream's tokens: mean over the time in which every stream was "
        "streaming, taken by a client process on the same cores. Engine alone: `Engine.step` at the same batch and "
        "contexts, mean of the runs just before and after. Added: the gap minus the engine's step alone, run by run; it is "
        "the sum of what lies between two steps and of what the step itself takes longer.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        notes=(
            "CPU of the decode worker has the model's arithmetic in it; 'CPU added' is all processes together less the "
            "engine alone.",
        ),
    )


def _time_measures(name: str, runs: list[Pair], added: Spread, config: StreamsBenchConfig) -> list[Measure]:
    """The gap, the engine's step, and what is between them in its parts."""

    def row(what: str, seconds: list[float]) -> Measure:
        return measure(f"{name}: {what}", "ms", spread(seconds, 1e3))

    return [
        row(f"engine alone, step at batch {config.streams}", [p.alone_step_s for p in runs]),
        row("gap between a stream's tokens", [p.served.itl_s for p in runs]),
        measure(f"{name}: added to each token", "ms", added),
        row("of it between two steps", [p.served.itl_s - p.served.step_s for p in runs]),
        row("of it in the step itself", [p.served.step_s - p.alone_step_s for p in runs]),
        measure(f"{name}: added, per token made", "ms", spread(added.runs, 1 / config.streams)),
        row(f"TTFT, all {config.streams} at once", [p.served.ttft_s for p in runs]),
    ]


def _cpu_measures(name: str, runs: list[Pair]) -> list[Measure]:
    by_kind = {kind: [p.served.cpu_s_per_token[kind] for p in runs] for kind in runs[0].served.cpu_s_per_token}
    rows = {f"CPU per token, {kind}": values for kind, values in by_kind.items()}
    alone = [(p.before.cpu_s_per_token + p.after.cpu_s_per_token) / 2 for p in runs]
    rows["CPU per token, engine alone"] = alone
    rows["CPU added per token"] = [sum(p.served.cpu_s_per_token.values()) - a for p, a in zip(runs, alone, strict=True)]
    return [measure(f"{name}: {what}", "ms", spread(values, 1e3)) for what, values in rows.items()]
