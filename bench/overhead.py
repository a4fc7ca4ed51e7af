"""Where an engine step's time goes that is not the model's forward: scheduling and commit, batch building, sampling.

    step = [ schedule │ build batch │ forward + logits │ sample │ commit ]
           └── engine ┘└──────────── runner.execute ───────────┘└ engine ┘

`DissectedRunner` stands between engine and runner: it times `execute`, then does the batch's building and sampling once more by
themselves and times those; the second doing is taken out of the step's time. Does not know how the parts work.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from bench.checkpoint import HALF_B
from bench.engine import DECODE_BARS, EngineBenchConfig, random_prompts
from bench.progress import Say
from bench.report import Measure, Report, Verdict
from bench.stats import spread
from contracts.kv_layout import KVLayout
from engine.execution.interface import SampledToken, ScheduledBatch

if TYPE_CHECKING:
    from engine.execution.torch_runner import TorchRunner

OVERHEAD_BAR = 3.0  # per cent of a step


@dataclass(frozen=True, slots=True)
class RunnerTimes:
    """Seconds of one execute: as a whole, of its parts done alone, and of everything the dissection took."""

    execute_s: float
    build_s: float
    sample_s: float
    total_s: float


class DissectedRunner:
    """A ModelRunner around another; `times` has one entry per execute."""

    def __init__(self, inner: TorchRunner) -> None:
        self._inner = inner
        self.times: list[RunnerTimes] = []

    @property
    def layout(self) -> KVLayout:
        """The inner runner's."""
        return self._inner.layout

    @property
    def num_blocks(self) -> int:
        """The inner runner's."""
        return self._inner.num_blocks

    @property
    def vocab_size(self) -> int:
        """The inner runner's."""
        return self._inner.vocab_size

    @property
    def max_model_len(self) -> int:
        """The inner runner's."""
        return self._inner.max_model_len

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The inner runner's."""
        return self._inner.eos_token_ids

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        """The inner runner's answer; notes how long it and its parts took."""
        from engine.execution.input_batch import build_input_batch

        begin = time.perf_counter()
        answer = self._inner.execute(batch)
        execute_s = time.perf_counter() - begin
        build_s = _seconds(lambda: build_input_batch(batch))
        # The same rows again: KV cells get the values they have.
        logits = self._inner.logits(batch)
        rows = [request for request in batch.requests if request.samples]
        sample_s = _seconds(lambda: self._inner.sampler.sample(logits, rows))
        self.times.append(RunnerTimes(execute_s, build_s, sample_s, time.perf_counter() - begin))
        return answer


def _seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


@dataclass(slots=True)
class Shares:
    """Per cent of the mean decode step at one batch size, one entry per round."""

    engine: list[float] = field(default_factory=list)
    build: list[float] = field(default_factory=list)
    sample: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def add(self, step_s: list[float], times: list[RunnerTimes]) -> None:
        """One round's steps and what the runner took of each."""
        engine_s = sum(step - t.total_s for step, t in zip(step_s, times, strict=True))
        whole_s = engine_s + sum(t.execute_s for t in times)
        self.engine.append(100 * engine_s / whole_s)
        self.build.append(100 * sum(t.build_s for t in times) / whole_s)
        self.sample.append(100 * sum(t.sample_s for t in times) / whole_s)
        self.step_ms.append(1e3 * whole_s / len(times))

    @property
    def outside_forward(self) -> list[float]:
        """Everything that is not the forward, per round."""
        return [e + b + s for e, b, s in zip(self.engine, self.build, self.sample, strict=True)]


def run_overhead(path: Path, config: EngineBenchConfig, say: Say) -> Report:
    """Decode on the checkpoint at `path` at each batch size, `config.rounds` times."""
    from bench.ours import OurEngine, load_runner

    say("overhead: loading the model")
    runner = DissectedRunner(load_runner(path, config.threads))
    engine = OurEngine(runner)
    shares = {batch: Shares() for batch in DECODE_BARS}
    for number in range(config.rounds + 1):
        say(f"overhead: round {number} of {config.rounds}" if number else "overhead: warming up")
        rng = random.Random(config.seed + number)
        for batch, share in shares.items():
            prompts = random_prompts(rng, batch, config.decode_prompt_tokens, HALF_B.vocab_size)
            runner.times.clear()
            steps = engine.steps(prompts, config.decode_tokens)
            if number:
                share.add([step.step_s for step in steps[1:]], runner.times[1:])
    return overhead_report(shares, config)


def overhead_report(shares: dict[int, Shares], config: EngineBenchConfig) -> Report:
    """What is outside the forward, against the bar, and what it is made of."""
    measures, verdicts = [], []
    for batch, share in shares.items():
        outside = spread(share.outside_forward)
        verdicts.append(Verdict(f"outside the forward, batch {batch}", outside.median, "%", OVERHEAD_BAR, False))
        measures.append(Measure(f"step, batch {batch}", "ms", tuple(share.step_ms)))
        measures.append(Measure(f"schedule and commit, batch {batch}", "% of a step", tuple(share.engine)))
        measures.append(Measure(f"batch building, batch {batch}", "% of a step", tuple(share.build)))
        measures.append(Measure(f"sampling (greedy), batch {batch}", "% of a step", tuple(share.sample)))
    return Report(
        name="overhead",
        title="What the engine adds to the model's forward",
        command=f"python -m bench overhead --rounds {config.rounds} --threads {config.threads}",
        method=f"Decode steps after the first of {config.decode_prompt_tokens}-token prompts, {config.decode_tokens} tokens, "
        f"0.5B-shaped bf16 model, {config.threads} threads. Outside the forward: all of `Engine.step` but embedding to "
        "logits, that is schedule and commit, building the batch's tensors, and sampling.",
        measures=tuple(measures),
        verdicts=tuple(verdicts),
    )
