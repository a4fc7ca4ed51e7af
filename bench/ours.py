"""Our engine as it is measured: the production path (`engine.build`, `Engine.step`) in this process, without doors.

Does not know what it is compared with.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from contracts.clock import MonotonicClock
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from engine.build import ModelRuntimeConfig, load
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.interface import ModelRunner
from kv_transfer.region import SharedRegion

if TYPE_CHECKING:
    from engine.execution.torch_runner import TorchRunner

KV_TOKENS = 32_768
MAX_BATCHED_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Step:
    """One `Engine.step`: when it ended since the call, CPU seconds of the process until then, and how long it took."""

    end_s: float
    cpu_s: float
    step_s: float
    num_tokens: int  # computed
    num_answers: int  # requests that got a token


def load_runner(path: Path, threads: int, quantization: str = "auto") -> TorchRunner:
    """The model at `path` on a KV pool of KV_TOKENS, in its own dtype, its weights quantised where that is asked, warm."""
    config = ModelRuntimeConfig(
        model_dir=path, threads=threads, max_num_batched_tokens=MAX_BATCHED_TOKENS, quantization=quantization
    )
    model = load(config)
    num_blocks = model.num_blocks_for(KV_TOKENS * model.layout.token_bytes)
    # The runner keeps the mapping alive; it goes with the process.
    region = SharedRegion(num_blocks * model.layout.block_bytes)
    region.populate()
    return model.runner(region.buffer, num_blocks)


def load_ours(path: Path, threads: int, quantization: str = "auto") -> OurEngine:
    """The engine on the model at `path`."""
    return OurEngine(load_runner(path, threads, quantization))


class OurEngine:
    """An engine that is stepped from here. Owns nothing but its requests; `tokens` are those of the first prompt, the last time."""

    name = "diptych engine"

    def __init__(self, runner: ModelRunner) -> None:
        scheduler = SchedulerConfig(max_num_batched_tokens=MAX_BATCHED_TOKENS)
        self._engine = Engine(runner, EngineConfig(scheduler=scheduler), MonotonicClock())
        self._numbers = itertools.count()
        self.tokens: tuple[int, ...] = ()

    def steps(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> list[Step]:
        """Generate `num_tokens` greedily for each prompt, all admitted at once; every step until all are done."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)
        steps = []
        names = [f"bench-{next(self._numbers)}" for _ in prompts]
        first: list[int] = []
        begin = time.perf_counter()
        for name, prompt in zip(names, prompts, strict=True):
            self._engine.admit(GenerationRequest(name, tuple(prompt), sampling))
        while self._engine.has_work:
            start = time.perf_counter()
            output = self._engine.step()
            end = time.perf_counter()
            answers = sum(1 for delta in output.deltas if delta.token_ids)
            steps.append(Step(end - begin, time.process_time(), end - start, output.num_scheduled_tokens, answers))
            first += [token for delta in output.deltas if delta.request_id == names[0] for token in delta.token_ids]
        self._engine.check_integrity()
        self.tokens = tuple(first)
        return steps

    def step_ends_s(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> tuple[float, ...]:
        """Generate for prompts that fit one step; seconds from the call to the end of each step."""
        steps = self.steps(prompts, num_tokens)
        if len(steps) != num_tokens or any(step.num_answers != len(prompts) for step in steps):
            raise RuntimeError(f"{len(steps)} steps for {num_tokens} tokens of {len(prompts)} prompts")
        return tuple(step.end_s for step in steps)
