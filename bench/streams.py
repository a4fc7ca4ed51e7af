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

import random
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from bench.cluster import EngineSteps, ServedCluster
from bench.load import LoadFailed, LoadPlan, LoadRequest, Protocol, Route, run_load
from bench.ours import OurEngine
from bench.progress import Say
from bench.report import Measure, Report, Verdict, measure
from bench.stats import Spread, spread, steady_itl_s, steady_window_s
from bench.ttft import ORDINARY_FROM

ADDED_BAR_MS = 1.0


@dataclass(frozen=True, slots=True)
class StreamsBenchConfig:
    """Sizes in tokens."""

    streams: int = 32
    rounds: int = 5
    prompt_tokens: int = 64
    output_tokens: int = 128
    threads: int = 1
    scrape_s: float = 1.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class ServedRound:
    """One run of all streams. Gap and the decode worker's own step are means over the time in which all streamed."""

    itl_s: float
    step_s: float
    ttft_s: float
    cpu_s_per_token: dict[str, float]


@dataclass(slots=True)
class StreamTimes:
    """All rounds."""

    engine_step_s: list[float] = field(default_factory=list)
    engine_cpu_s_per_token: list[float] = field(default_factory=list)
    served: dict[Protocol, list[ServedRound]] = field(default_factory=lambda: {p: [] for p in Protocol})


def stream_prompts(config: StreamsBenchConfig, vocab_size: int, run: int) -> list[tuple[int, ...]]:
    """Prompts of one run, which no other run has."""
    rng = random.Random(f"{config.seed}-{run}")
    return [
        tuple(rng.randrange(ORDINARY_FROM, vocab_size) for _ in range(config.prompt_tokens))
        for _ in range(config.streams)
    ]


def engine_round(engine: OurEngine, prompts: list[tuple[int, ...]], config: StreamsBenchConfig) -> tuple[float, float]:
    """Mean seconds of a decode step at full batch, and CPU seconds per token of the whole run."""
    begin = time.process_time()
    steps = engine.steps(prompts, config.output_tokens)
    cpu_s = time.process_time() - begin
    full = [i for i, step in enumerate(steps) if step.num_answers == step.num_tokens == config.streams]
    first, last = steps[full[0] - 1], steps[full[-1]]
    return (last.end_s - first.end_s) / len(full), cpu_s / (config.streams * config.output_tokens)


def served_round(
    cluster: ServedCluster, protocol: Protocol, prompts: list[tuple[int, ...]], config: StreamsBenchConfig
) -> ServedRound:
    """All streams at once over `protocol`."""
    way = Route.DISAGGREGATED if protocol is Protocol.GRPC else Route.ANY
    requests = tuple(LoadRequest(prompt, config.output_tokens, way) for prompt in prompts)
    address = cluster.grpc if protocol is Protocol.GRPC else cluster.http
    before = cluster.cpu_s()
    with Watch(cluster, config.scrape_s) as watch:
        answers = run_load(LoadPlan(protocol, address, cluster.model, config.streams, requests))
    after = cluster.cpu_s()
    num_tokens = sum(answer.num_tokens for answer in answers)
    times = [answer.times for answer in answers]
    return ServedRound(
        itl_s=steady_itl_s(times),
        step_s=mean_step_s(watch.seen, steady_window_s(times)),
        ttft_s=sum(answer.times.ttft_s for answer in answers) / len(answers),
        cpu_s_per_token={kind: (after[kind] - before[kind]) / num_tokens for kind in after},
    )


class Watch:
    """Asks the decode worker for its counters every `pause_s` while it is entered; `seen` has the answers."""

    def __init__(self, cluster: ServedCluster, pause_s: float) -> None:
        self._cluster = cluster
        self._pause_s = pause_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self.seen: list[EngineSteps] = []

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
            self.seen.append(self._cluster.engine_steps("decode"))


def mean_step_s(seen: Sequence[EngineSteps], window_s: tuple[float, float]) -> float:
    """The mean step between the first and the last look inside the window. LoadFailed when there are not two."""
    begin, end = window_s
    inside = [look for look in seen if begin <= look.at_s <= end]
    num_steps = inside[-1].num_steps - inside[0].num_steps if inside else 0
    if num_steps == 0:
        raise LoadFailed("the streams ran side by side too briefly to look at the worker's steps twice")
    return (inside[-1].step_s - inside[0].step_s) / num_steps


def run_streams(model: Path, cluster: ServedCluster, vocab_size: int, config: StreamsBenchConfig, say: Say) -> Report:
    """Engine alone, gRPC and SSE in turns, after one run of each that does not count."""
    import torch

    from bench.ours import load_ours

    say("streams: loading the model for the engine alone")
    engine = load_ours(model, config.threads)
    torch.set_num_threads(config.threads)
    times = StreamTimes()
    run = 0
    for number in range(config.rounds + 1):
        say(f"streams: round {number} of {config.rounds}" if number else "streams: warming up")
        step_s, cpu_s = engine_round(engine, stream_prompts(config, vocab_size, run), config)
        rounds = {}
        for protocol in Protocol:
            run += 1
            rounds[protocol] = served_round(cluster, protocol, stream_prompts(config, vocab_size, run), config)
        run += 1
        if number:
            times.engine_step_s.append(step_s)
            times.engine_cpu_s_per_token.append(cpu_s)
            for protocol, served in rounds.items():
                times.served[protocol].append(served)
    return streams_report(times, cluster.model, config)


def streams_report(times: StreamTimes, model: str, config: StreamsBenchConfig) -> Report:
    """Added time per token over each protocol against the bar, and CPU per token of every process."""
    engine = spread(times.engine_step_s, 1e3)
    measures = [measure(f"engine alone, step at batch {config.streams}", "ms", engine)]
    verdicts, notes = [], []
    for protocol, rounds in times.served.items():
        served = spread([r.itl_s for r in rounds], 1e3)
        added = Spread(tuple(s - e for s, e in zip(served.runs, engine.runs, strict=True)))
        name = protocol.value
        measures.append(measure(f"{name}: gap between a stream's tokens", "ms", served))
        measures += _added_measures(name, served, spread([r.step_s for r in rounds], 1e3), engine)
        measures.append(measure(f"{name}: added to each stream's gap", "ms", added))
        measures.append(measure(f"{name}: the same per token made", "ms", spread(added.runs, 1 / config.streams)))
        measures.append(
            measure(f"{name}: TTFT, all {config.streams} at once", "ms", spread([r.ttft_s for r in rounds], 1e3))
        )
        measures += _cpu_measures(name, rounds)
        verdicts.append(Verdict(f"added per streamed token, {name}", added.median, "ms", ADDED_BAR_MS, False))
    measures.append(measure("engine alone: CPU per token", "ms", spread(times.engine_cpu_s_per_token, 1e3)))
    notes.append(
        "CPU per token of the prefill and decode workers has the model's arithmetic in it; the engine alone shows how much."
    )
    return Report(
        name="streams",
        title=f"What serving adds to a token at {config.streams} streams",
        command=f"python -m bench streams --streams {config.streams} --rounds {config.rounds}",
        method=f"{model}, {config.threads} thread a worker; {config.streams} prompts of {config.prompt_tokens} tokens, "
        f"{config.output_tokens} tokens each. Served gap: mean over the time in which every stream was streaming, taken "
        "by a client process on the same cores. Engine alone: `Engine.step` at the same batch and contexts. Added: "
        "served gap - engine step, run by run.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
        notes=tuple(notes),
    )


def _added_measures(name: str, served: Spread, step: Spread, engine: Spread) -> list[Measure]:
    """The two parts of what is added, run by run."""
    between = tuple(gap - own for gap, own in zip(served.runs, step.runs, strict=True))
    slower = tuple(own - alone for own, alone in zip(step.runs, engine.runs, strict=True))
    return [
        Measure(f"{name}: added between two steps", "ms", between),
        Measure(f"{name}: added to the step itself", "ms", slower),
    ]


def _cpu_measures(name: str, rounds: list[ServedRound]) -> list[Measure]:
    kinds = rounds[0].cpu_s_per_token
    return [
        measure(f"{name}: CPU per token, {kind}", "ms", spread([r.cpu_s_per_token[kind] for r in rounds], 1e3))
        for kind in kinds
    ]
