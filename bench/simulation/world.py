"""One load through two pools under one choice of policies, in virtual time: when first tokens came, and what was cached.

Does not know what is compared with what.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from bench.simulation.costs import Costs
from bench.simulation.routers import RouterSetup, Sent, SimulatedRouter
from bench.simulation.trace import Asked
from bench.simulation.workers import LAYOUT, SimulatedWorker, Timeline
from contracts.request import GenerationRequest
from contracts.sampling import SamplingParams
from contracts.worker import WorkerInfo, WorkerKind, WorkerRef
from engine.kv.lease import KVLease
from engine.output import Retained, StepOutput
from router.policies import Policy, PolicyContext, make_policy

_ASK_AGAIN_S = 0.02  # where a decode worker had no room


@dataclass(frozen=True, slots=True)
class Setup:
    """The pools: workers of each, and blocks of 16 tokens of each worker. Several routers take requests in turn."""

    routers: RouterSetup
    num_prefill: int = 4
    num_decode: int = 4
    prefill_blocks: int = 640
    decode_blocks: int = 1024
    num_routers: int = 1
    costs: Costs = field(default_factory=Costs)
    make: Callable[[str, PolicyContext], Policy] = make_policy


@dataclass(slots=True)
class Outcome:
    """What became of one request. Seconds and tokens."""

    num_prompt: int
    arrived_s: float
    first_s: float = -1.0
    second_s: float = -1.0
    ended_s: float = -1.0
    num_cached: int = 0  # at prefill
    num_not_sent: int = 0  # cached at decode
    prefill: str = ""  # who computed the prompt
    alone: bool = False  # on a decode worker


@dataclass(slots=True)
class _Running:
    asked: Asked
    sent: Sent
    outcome: Outcome
    lease: KVLease | None = None
    retained: Retained | None = None


class World:
    """Runs once."""

    def __init__(self, setup: Setup, load: Sequence[Asked]) -> None:
        self._setup = setup
        self._load = load
        self._timeline = Timeline()
        self._workers = {worker.info.ref: worker for worker in self._make_workers()}
        workers = tuple(self._workers.values())
        self._routers = [
            SimulatedRouter(workers, self._timeline, replace(setup.routers, seed=setup.routers.seed + n), setup.make)
            for n in range(setup.num_routers)
        ]
        self._running: dict[str, _Running] = {}
        self._num_left = len(load)

    def run(self) -> list[Outcome]:
        """Every request's outcome, in the order in which they came."""
        outcomes = []
        for number, asked in enumerate(self._load):
            outcome = Outcome(len(asked.token_ids), asked.at_s)
            outcomes.append(outcome)
            self._timeline.after(asked.at_s, partial(self._arrive, number, asked, outcome))
        phases = random.Random(1)
        for worker in self._workers.values():
            self._timeline.after(phases.random() * self._setup.costs.announce_every_s, partial(self._announce, worker))
        self._timeline.run(lambda: self._num_left == 0)
        return outcomes

    def check_idle(self) -> None:
        """Raise RuntimeError unless every request has ended and every block is free or cached."""
        for worker in self._workers.values():
            worker.engine.check_integrity()
            if worker.engine.has_work or worker.engine.load().kv_usage:
                raise RuntimeError(f"{worker.info.ref.worker_id} has work left")
        for router in self._routers:
            left = [ref.worker_id for ref in self._workers if not router.pools.tally(ref).empty]
            if left or self._running:
                raise RuntimeError(f"still claimed: {left}; still running: {sorted(self._running)}")

    def _make_workers(self) -> list[SimulatedWorker]:
        setup, made = self._setup, []
        for kind, count, blocks in (
            (WorkerKind.PREFILL, setup.num_prefill, setup.prefill_blocks),
            (WorkerKind.DECODE, setup.num_decode, setup.decode_blocks),
        ):
            for number in range(count):
                ref = WorkerRef(f"{kind}-{number}", 1)
                info = WorkerInfo(ref, kind, f"{ref.worker_id}:1", "simulated", LAYOUT, ("local",), 8192, blocks)
                started = self._on_started if kind is WorkerKind.PREFILL else None
                made.append(SimulatedWorker(info, self._timeline, setup.costs, self._on_output, started))
        return made

    def _arrive(self, number: int, asked: Asked, outcome: Outcome) -> None:
        request_id = f"r{number}"
        sent = self._routers[number % len(self._routers)].send(request_id, asked)
        outcome.prefill, outcome.alone = sent.prefill.worker_id, sent.alone
        self._running[request_id] = _Running(asked, sent, outcome)
        sampling = SamplingParams(max_tokens=asked.num_output, ignore_eos=True)
        request = GenerationRequest(request_id, asked.token_ids, sampling)
        worker = self._workers[sent.prefill]

        def admit() -> None:
            worker.engine.admit(request, retain_kv=not sent.alone)
            worker.wake()

        self._timeline.after(self._setup.costs.tell_s, admit)

    def _announce(self, worker: SimulatedWorker) -> None:
        load = worker.engine.load()
        for router in self._routers:
            router.pools.announced(worker.info, load)
        self._timeline.after(self._setup.costs.announce_every_s, partial(self._announce, worker))

    def _tell_blocks(self, worker: SimulatedWorker) -> None:
        changes = worker.engine.block_news.take()
        if changes is not None:
            for router in self._routers:
                self._timeline.after(self._setup.costs.tell_s, partial(router.hear, worker.info.ref, changes))

    def _on_started(self, worker: SimulatedWorker, request_ids: tuple[str, ...]) -> None:
        del worker
        for request_id in request_ids:
            self._timeline.after(self._setup.costs.tell_s, partial(self._reserve, request_id))

    def _reserve(self, request_id: str) -> None:
        running = self._running[request_id]
        decode = self._workers[running.sent.decode]
        hashes = decode.engine.block_hashes(running.asked.token_ids)
        running.lease = decode.engine.reserve(request_id, len(running.asked.token_ids), hashes)
        if running.lease is None:
            self._timeline.after(_ASK_AGAIN_S, partial(self._reserve, request_id))
            return
        running.outcome.num_not_sent = running.lease.num_cached_tokens
        self._hand_over(running)

    def _hand_over(self, running: _Running) -> None:
        """Once the prompt is computed and there is room for its KV."""
        if running.lease is None or running.retained is None:
            return
        num_tokens = len(running.asked.token_ids) - running.outcome.num_not_sent
        took_s = self._setup.costs.handover_s(num_tokens)
        stages = replace(running.retained.stages, transfer_s=took_s)
        told = partial(running.sent.handed_over, stages, num_tokens * LAYOUT.token_bytes)
        self._timeline.after(took_s, partial(self._commit, running, told))

    def _commit(self, running: _Running, told: Callable[[], None]) -> None:
        lease, retained = running.lease, running.retained
        if lease is None or retained is None:
            raise RuntimeError("a hand-off is committed that has not been made")
        prefill, decode = self._workers[running.sent.prefill], self._workers[running.sent.decode]
        decode.engine.adopt(retained.request, lease, retained.num_computed_tokens)
        prefill.engine.release(retained.lease)
        told()
        for worker in (prefill, decode):
            self._tell_blocks(worker)
            worker.wake()

    def _on_output(self, worker: SimulatedWorker, output: StepOutput) -> None:
        now = self._timeline.now()
        for retained in output.retained:
            running = self._running[retained.request_id]
            running.retained = retained
            running.outcome.num_cached = retained.num_cached_tokens
            self._hand_over(running)
        for delta in output.deltas:
            if delta.error is not None:
                raise RuntimeError(f"a simulated worker failed a request: {delta.error.message}")
            running = self._running[delta.request_id]
            if not running.sent.progress.token_ids:
                running.outcome.first_s = now
                if running.sent.alone:
                    running.outcome.num_cached = running.outcome.num_not_sent = delta.num_cached_tokens
            elif len(running.sent.progress.token_ids) == 1:
                running.outcome.second_s = now
            running.sent.heard(delta)
            if delta.finish_reason is not None:
                self._end(delta.request_id)
        self._tell_blocks(worker)

    def _end(self, request_id: str) -> None:
        running = self._running.pop(request_id)
        running.outcome.ended_s = self._timeline.now()
        self._num_left -= 1
