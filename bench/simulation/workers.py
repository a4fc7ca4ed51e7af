"""Workers of both pools in virtual time: the real engine with its scheduler, prefix cache and block news, on no model at all.

    admit ─▶ step … step ─▶ first token, Retained ─▶ hand-over passes ─▶ adopt at decode ─▶ step … ─▶ the last token

A step's work is done when it begins; what it made is told when its time has passed. Does not know routers.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable

from bench.simulation.costs import Costs
from contracts.clock import Clock
from contracts.kv_layout import KVLayout
from contracts.worker import WorkerInfo
from engine.config import EngineConfig, SchedulerConfig
from engine.engine import Engine
from engine.execution.interface import SampledToken, ScheduledBatch
from engine.output import StepOutput

LAYOUT = KVLayout("simulated", "bfloat16", num_layers=30, num_kv_heads=3, head_size=64, block_size=16)
VOCAB_SIZE = 50_000


class Timeline:
    """What happens when. Its clock is the instant of what happens now; nobody sleeps on it."""

    def __init__(self) -> None:
        self._now = 0.0
        self._order = itertools.count()
        self._due: list[tuple[float, int, Callable[[], object]]] = []

    def now(self) -> float:
        """See Clock."""
        return self._now

    async def sleep(self, delay_s: float) -> None:
        """See Clock."""
        raise RuntimeError(f"nobody sleeps for {delay_s} s on a timeline: say `after`")

    def call_later(self, delay_s: float, ring: Callable[[], object]) -> Callable[[], object]:
        """See Clock."""
        raise RuntimeError(f"what is called in {delay_s} s on a timeline cannot be taken back: say `after`, not {ring}")

    def after(self, delay_s: float, act: Callable[[], object]) -> None:
        """Do this in `delay_s` seconds."""
        heapq.heappush(self._due, (self._now + delay_s, next(self._order), act))

    def run(self, until: Callable[[], bool]) -> None:
        """Do everything in its order, until `until` holds after something was done."""
        while self._due and not until():
            self._now, _, act = heapq.heappop(self._due)
            act()


class _Runner:
    """Makes the same token for everybody and notes what the step had to do."""

    layout = LAYOUT
    vocab_size = VOCAB_SIZE
    max_model_len = 8192
    eos_token_ids: frozenset[int] = frozenset()

    def __init__(self, num_blocks: int, costs: Costs) -> None:
        self.num_blocks = num_blocks
        self.step_s = 0.0
        self._costs = costs

    def execute(self, batch: ScheduledBatch) -> tuple[SampledToken, ...]:
        """See ModelRunner."""
        self.step_s = self._costs.batch_s(batch)
        return tuple(SampledToken(1 if request.samples else None) for request in batch.requests)


class SimulatedWorker:
    """One engine that steps while it has work. `on_output` hears of each step when its time has passed."""

    def __init__(
        self,
        info: WorkerInfo,
        timeline: Timeline,
        costs: Costs,
        on_output: Callable[[SimulatedWorker, StepOutput], None],
        on_started: Callable[[SimulatedWorker, tuple[str, ...]], None] | None = None,
    ) -> None:
        clock: Clock = timeline
        self.info = info
        self._timeline = timeline
        self._runner = _Runner(info.num_blocks, costs)
        scheduler = SchedulerConfig(max_num_batched_tokens=512, max_num_seqs=64)
        self.engine = Engine(self._runner, EngineConfig(scheduler), clock)
        self.engine.block_news.listen()
        self._on_output = on_output
        self._on_started = on_started
        self._stepping = False

    def wake(self) -> None:
        """There may be something to do."""
        if self._stepping or not self.engine.has_work:
            return
        output = self.engine.step(None if self._on_started is None else self._started)
        if not output.made_progress:
            return  # all that is here waits for blocks held outside; whoever gives them back wakes it
        self._stepping = True
        self._timeline.after(self._runner.step_s, lambda: self._stepped(output))

    def _stepped(self, output: StepOutput) -> None:
        self._stepping = False
        self._on_output(self, output)
        self.wake()

    def _started(self, request_ids: tuple[str, ...]) -> None:
        if self._on_started is not None:
            self._on_started(self, request_ids)
