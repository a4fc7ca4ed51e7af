"""A whole deployment in one event loop on a virtual clock: router, workers, connectors, clients, and a wire between all of them.

    client ──▶ Inference ─ Flow ─ legs ──┐                                        ┌── PrefillServicer ─ PrefillWorker
    announcements ─▶ EmbeddedRegistry    ├── channel ── Wire (faults) ── bytes ┼── DecodeServicer  ─┐
                    PrefillWorker's peer ┘                                        └── HandoffServicer ─┴ DecodeWorker
                    LocalConnector ───────────────────── Wire ───────────────────────▶ KV memory of decode

Everything above the wire is product code, the engine with its fake runner included; steps take time on the clock. No thread, no
socket, no real time: a second of this world costs milliseconds, and one seed gives one history.

A worker that restarts loses all its state at once: its calls break, it neither sends nor hears anything, its memory is gone; a
new life with the same id and address and a newer epoch comes after a while. (Its tasks are then wound up behind the curtain.)
"""

from __future__ import annotations

import asyncio
import functools
import itertools
import logging
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

from contracts.clock import VirtualClock
from contracts.errors import DiptychError, Unavailable
from contracts.pb.diptych.v1 import registry_pb2_grpc
from contracts.request import GenerationRequest
from contracts.worker import WorkerKind, WorkerRef
from engine.engine import Engine, KVLease
from engine.execution.fake import expected_tokens
from kv_transfer.local import LocalHub
from observability.decision_metrics import DecisionMetrics
from observability.metrics import RouterMetrics
from observability.policy_metrics import PolicyMetrics
from router.admission.gate import READERS, Gate
from router.admission.limits import LocalBuckets
from router.admission.permits import Admission
from router.admission.rate_limits import RateLimits
from router.choosing.advisor import Advisor
from router.choosing.choice import Chooser
from router.choosing.prefix_index import PrefixIndex
from router.choosing.prompts import Prompts
from router.config import (
    AdmissionConfig,
    BreakerConfig,
    CanaryConfig,
    DisaggregationConfig,
    DisaggregationMode,
    LimitsConfig,
    RegistryConfig,
    RetryConfig,
)
from router.exchange import Ask, TokenPrompt
from router.grpc_front import RegistryServicer
from router.halt import Halt
from router.policies import make_policy
from router.service import Inference
from router.serving.answers import derived_seed
from router.serving.attempts import Means
from router.serving.flow import Flow
from router.serving.retry_budget import RetryBudget
from router.text.model_card import ModelCard, load_model_card
from router.text.prompting import Prompter
from router.text.template_processes import TemplateProcesses
from router.workers.breakers import Breakers
from router.workers.canary import Canary
from router.workers.embedded_registry import EmbeddedRegistry
from router.workers.pairs import PairBook
from router.workers.pools import Pools
from rpc.channel import ChannelConfig
from tests.faults.channel import opener
from tests.faults.network import Network
from tests.faults.process import Process
from tests.faults.wire import Crossing, Fault, Met, Wire
from tests.faults.workers import MODEL, MODEL_NAME, Life, Place, held, launch

RETRY = RetryConfig(worker_wait_s=5.0, handoff_verdict_s=1.0)
REGISTRY = RegistryConfig(ttl_s=1.0)
NO_CANARIES = CanaryConfig(interval_s=0)  # what crosses is the clients' alone, and no pair is called bad
CANARIES = CanaryConfig(interval_s=0.3, spacing_s=0.05, timeout_s=1.0, retry_s=0.2, max_backoff_s=1.0)
TINY = Path(__file__).parents[1] / "fixtures/tiny-austen"
CHANNEL = ChannelConfig(connect_timeout_s=0.5)
CALM_S = 8.0  # after the last client every patience above has ended


@functools.cache
def model_card() -> ModelCard:
    return load_model_card(TINY, MODEL_NAME)


@dataclass
class Client:
    """One request and what came of it: `outcome` "tokens", "left", or an error's code."""

    number: int
    start_s: float
    ask: Ask
    timeout_s: float = 20.0
    tokens: dict[int, list[int]] = field(default_factory=dict)
    outcome: str = ""
    ended_s: float = 0.0
    error: DiptychError | None = None
    task: asyncio.Task[None] | None = None

    @property
    def prompt(self) -> tuple[int, ...]:
        assert isinstance(self.ask.prompt, TokenPrompt)
        return self.ask.prompt.token_ids

    def expected(self, index: int) -> tuple[int, ...]:
        """What answer `index` must be, whoever makes it."""
        sampling = replace(self.ask.sampling, seed=derived_seed(self.ask.sampling.seed, index))
        return expected_tokens(GenerationRequest("x", self.prompt, sampling), MODEL)


@dataclass(frozen=True)
class Setup:
    """What the world is made of."""

    seed: int = 0
    plan: Sequence[Fault] = ()
    num_prefill: int = 2
    num_decode: int = 2
    prefill_blocks: int = 96
    decode_blocks: int = 96
    max_running: int = 256
    canaries: CanaryConfig = NO_CANARIES
    failing_writes: int = 0  # the first so many of all writes fail, beside the plan


async def nobody_is_a_stranger(channel, address):
    """These networks know no secrets, and each message more would be another order of them all."""


class World:
    """See the module. Made in a running VirtualTimeLoop; `close` leaves no task behind."""

    def __init__(self, clock: VirtualClock, setup: Setup) -> None:
        self.clock = clock
        self.setup = setup
        self.rng = random.Random(setup.seed)
        self.wire = Wire(clock, random.Random(setup.seed + 1), setup.plan)
        self.wire.surgeon = self
        self.network = Network(clock, self.wire)
        self.network.failing_writes = setup.failing_writes
        self.hub = LocalHub()
        self.lives: dict[str, Life] = {}
        self.clients: list[Client] = []
        self._ids = itertools.count(1)
        self._behind: set[asyncio.Task] = set()  # burials, revivals, hogs
        self._hogs = itertools.count(1)
        self._router()

    def _router(self) -> None:
        setup, clock = self.setup, self.clock
        self.router = Process("router", "router:1")
        self.network.join(self.router)
        self.registry = EmbeddedRegistry(REGISTRY, MODEL_NAME, clock)
        registry_pb2_grpc.add_RegistryServicer_to_server(RegistryServicer(self.registry), self.router)
        self.pools = Pools(
            self.registry,
            Breakers(BreakerConfig(), clock, self.rng),
            CHANNEL,
            opener(self.network, self.router),
            vet=nobody_is_a_stranger,
        )
        self.admission = Admission(AdmissionConfig(max_running=setup.max_running), clock)
        self.metrics = RouterMetrics(MODEL_NAME, list, lambda: (0, 0))
        prompts = Prompts(PrefixIndex(clock), PolicyMetrics(self.metrics.registry))
        policies = {kind: make_policy("least_loaded") for kind in WorkerKind}
        book = PairBook(setup.canaries, clock)
        self.registry.subscribe(book.on_change)
        chooser = Chooser(self.pools, policies, book, prompts)
        means = Means(
            self.pools,
            chooser,
            clock,
            RETRY,
            lambda: f"id-{next(self._ids)}",
            Halt(),
            book,
            RetryBudget(RETRY.budget, clock),
        )
        ways = DisaggregationConfig(DisaggregationMode.ALWAYS)
        advisor = Advisor(ways, clock, self.pools.loads, prompts.cached_tokens, DecisionMetrics(self.metrics.registry))
        self.registry.subscribe(advisor.on_change)
        self.ledger = advisor.ledger
        flow = Flow(means, self.metrics, advisor)
        self.registry.subscribe(flow.on_change)
        gate = Gate(self.admission, RateLimits(LimitsConfig(), LocalBuckets(clock)), Admission(READERS, clock))
        self.service = Inference(
            Prompter(model_card(), TemplateProcesses()), gate, flow, self.registry, clock, self.metrics
        )
        canary = Canary(means, book, setup.canaries, self.metrics)
        self._own = [asyncio.ensure_future(self._keep_house()), asyncio.ensure_future(canary.run())]

    async def _keep_house(self) -> None:
        while True:
            self.registry.expire()
            await self.clock.sleep(REGISTRY.ttl_s / 4)

    async def start(self) -> None:
        """All workers are known to the router when this returns; the wire's record begins."""
        for index in range(self.setup.num_prefill):
            self._launch(WorkerRef(f"p{index}", 1), WorkerKind.PREFILL)
        for index in range(self.setup.num_decode):
            self._launch(WorkerRef(f"d{index}", 1), WorkerKind.DECODE)
        while len(self.registry.workers()) < len(self.lives):
            await self.clock.sleep(0.01)
        self.wire.begin()

    # Workers

    def _launch(self, ref: WorkerRef, kind: WorkerKind) -> None:
        num_blocks = self.setup.prefill_blocks if kind is WorkerKind.PREFILL else self.setup.decode_blocks
        self.lives[ref.worker_id] = launch(Place(self.network, self.hub), ref, kind, num_blocks)

    # What faults ask for

    def restart(self, worker: str) -> None:
        """See Surgeon."""
        life = self.lives[worker]
        if not life.process.alive:
            return
        self.network.kill(life.process)
        life.announcing.cancel()
        self._do(self._bury(life))
        self._do(self._revive(life, self.rng.choice((0.1, 0.5, 2.0))))

    def leave(self, crossing: Crossing) -> None:
        """See Surgeon."""
        client = self.owner(Met(self.clock.now(), crossing))
        if client is not None and client.task is not None:
            client.task.cancel()

    async def fill(self, worker: str) -> None:
        """See Surgeon."""
        life = self.lives[worker]
        driver = life.worker.driver
        name = f"hog-{next(self._hogs)}"
        leases: list[KVLease] = []

        def take(engine: Engine) -> None:
            num_tokens = life.num_blocks * MODEL.layout.block_size
            while num_tokens >= 1:
                lease = engine.reserve(f"{name}-{len(leases)}", num_tokens, ())
                if lease is None:
                    num_tokens //= 2
                else:
                    leases.append(lease)

        async def give_back() -> None:
            await self.clock.sleep(self.rng.choice((0.2, 1.0, 3.0)))
            driver.post(lambda engine: [engine.release(lease) for lease in leases])

        try:
            await driver.call(take)
        except Unavailable:
            return
        self._do(give_back())

    def client_of(self, ids: Sequence[str]) -> Client | None:
        """Whose these hand-offs or requests are."""
        prompts = [self.network.prompts[i] for i in ids if i in self.network.prompts]
        owners = [c for c in self.clients if c.prompt in prompts]
        return owners[0] if owners else None

    def owner(self, met: Met) -> Client | None:
        """Whose message that was; that of one who was under way then, when it is nobody's."""
        owner = self.client_of(met.crossing.ids)
        if owner is not None:
            return owner
        return next((c for c in self.clients if c.start_s < met.at_s and not 0 < c.ended_s < met.at_s), None)

    async def _bury(self, life: Life) -> None:
        await life.connector.close()
        await life.worker.stop()

    async def _revive(self, life: Life, after_s: float) -> None:
        await self.clock.sleep(after_s)
        self._launch(WorkerRef(life.ref.worker_id, life.ref.epoch + 1), life.kind)

    def _do(self, work) -> None:
        task = asyncio.ensure_future(work)
        self._behind.add(task)

    # Clients

    async def serve(self, clients: Sequence[Client]) -> None:
        """Run them all; return when each has ended."""
        await self.begin(clients)

    def begin(self, clients: Sequence[Client]) -> asyncio.Task:
        """The same, without waiting; the task returned is done when each has ended."""
        self.clients = list(clients)
        for client in self.clients:
            client.task = asyncio.ensure_future(self._ask(client))
        return asyncio.ensure_future(asyncio.wait([client.task for client in self.clients if client.task is not None]))

    async def _ask(self, client: Client) -> None:
        try:
            await self.clock.sleep(client.start_s - self.clock.now())
            async with aclosing(self.service.answer(client.ask, client.timeout_s)) as pieces:
                async for piece in pieces:
                    client.tokens.setdefault(piece.index, []).extend(piece.token_ids)
            client.outcome = "tokens"
        except asyncio.CancelledError:
            client.outcome = "left"
        except DiptychError as error:
            client.outcome, client.error = error.code.value, error
        finally:
            client.ended_s = self.clock.now()

    # The end

    async def calm(self, within_s: float = CALM_S) -> float:
        """Wait until nothing of any request is left anywhere; how long that took. AssertionError after `within_s`."""
        began = self.clock.now()
        while left := self.leftovers():
            assert self.clock.now() < began + within_s, f"still there after {within_s} s: {left}"
            await self.clock.sleep(0.01)
        return self.clock.now() - began

    async def calm_but(self, stays: Client, within_s: float) -> None:
        """Wait until no block is held for anybody but this client. AssertionError after `within_s`."""
        began = self.clock.now()
        while left := self._holders() - {stays.prompt}:
            assert self.clock.now() < began + within_s, f"blocks of {len(left)} prompts are held after {within_s} s"
            await self.clock.sleep(0.01)

    def _holders(self) -> set[tuple[int, ...] | None]:
        """The prompts for which any engine holds blocks; None for a lease of nobody."""
        holders = {lease.holder for life in self.lives.values() for lease in life.engine._kv.living_leases()}
        return {self.network.prompts.get(holder) for holder in holders}

    def leftovers(self) -> list[str]:
        """Everything that requests hold, in words; none when the world is as it was before them."""
        left = [f"{len([t for t in self._behind if not t.done()])} behind"] if self._unfinished() else []
        for name, life in self.lives.items():
            left += [f"{name}: {what}" for what in held(life)]
        if self.admission.num_running or self.admission.num_waiting:
            left.append(f"admission: {self.admission.num_running} running, {self.admission.num_waiting} waiting")
        for ref, peer in self.pools._peers.items():
            if not peer.tally.empty:
                left.append(f"router: {peer.tally.num_inflight} claims or what they counted, on {ref}")
            if peer.session._inboxes:
                left.append(f"router: session to {ref} carries {list(peer.session._inboxes)}")
            if peer.line._carried:
                left.append(f"router: session to {ref} carries prompts {list(peer.line._carried)}")
        left += [f"router: believes that {ref} has something" for ref in self.ledger.holding]
        return left

    def _unfinished(self) -> bool:
        return any(not task.done() for task in self._behind)

    async def close(self) -> None:
        """Stop everything. AssertionError when a task is left, or one behind the curtain failed."""
        for task in self._behind:
            await task
        for task in self._own:
            task.cancel()
        if self.router.alive:
            self.network.kill(self.router)  # a late announcement finds nobody
        for life in self.lives.values():
            life.announcing.cancel()
        await self.pools.close()
        for life in self.lives.values():
            assert not life.worker.fatal.done(), life.worker.fatal.result()
            await life.worker.stop()
            await life.connector.close()
        await self.network.quiet()
        left = asyncio.all_tasks() - {asyncio.current_task()}
        if left:
            await asyncio.wait(left, timeout=1.0)
        left = {task for task in left if not task.done()}
        assert not left, f"tasks are left: {left}"


class Loud(logging.Handler):
    """Collects errors that product code logs: each is a fault of ours, whatever the clients got.

    But for one that is the operator's: canaries, where they are sent, say that every pair is bad when every pair is.
    """

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if not record.getMessage().startswith("no hand-off gets through"):
            self.said.append(self.format(record))
