"""A running router: its parts put together, its two doors opened, and both closed in the right order.

    start ──▶ serving ──drain──▶ new requests refused, running ones end ──stop──▶ ports given back

While it drains, workers still announce themselves, so that running requests can be retried. Does not know flags or
signals.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine

from contracts.clock import Clock
from contracts.errors import Unavailable
from contracts.upkeep import kept_up
from contracts.worker import WorkerKind
from observability.admission_metrics import AdmissionSeries
from observability.decision_metrics import DecisionMetrics
from observability.log import get_logger
from observability.metrics import RouterMetrics, WorkerSample
from observability.policy_metrics import PolicyMetrics
from observability.registry_metrics import RegistryMetrics
from observability.resilience_metrics import ResilienceMetrics
from router.admission.capacity import places_for
from router.admission.gate import READERS, Gate
from router.admission.permits import Admission
from router.admission.rate_limits import RateLimits
from router.admission.shared_limits import buckets
from router.board import Board
from router.choosing.advisor import Advisor
from router.choosing.placement import Placement
from router.config import RouterConfig
from router.doors import Doors, Ports
from router.grpc_front import InferenceServicer, RegistryServicer
from router.halt import Halt
from router.health import Health
from router.http.body import FrontLimits
from router.http.dashboard import DashboardFront
from router.http.front import HttpFront
from router.openai.chat import ChatRules
from router.prompt_log import heard, unheard
from router.service import Inference
from router.serving.attempts import Means
from router.serving.flow import Flow
from router.serving.retry_budget import RetryBudget
from router.text.model_card import load_model_card
from router.text.prompting import Prompter
from router.text.template_processes import TemplateProcesses
from router.tracing import open_tracing
from router.workers.breaker_news import BreakerNews
from router.workers.breakers import Breakers
from router.workers.canary import Canary
from router.workers.membership import Membership, reprieve
from router.workers.pairs import PairBook
from router.workers.pools import Pools
from router.workers.relief import relieve
from rpc.proving_channel import proving
from rpc.secure_channel import opener_for
from rpc.server import join_address

log = get_logger(__name__)
_EXPIRY_CHECKS_PER_TTL = 4
_HEALTH_CHECK_S = 0.5
_LAST_SPANS_S = 2.0


class RouterServer:
    """Owns everything that runs in a router process. Must be made in a running event loop; `stop` gives all back."""

    def __init__(self, config: RouterConfig, clock: Clock) -> None:
        """Reads the model directory; raises ConfigError naming what is wrong with it or with the configuration."""
        self._config = config
        self._clock = clock
        self._membership = Membership(config.registry, config.redis, config.model_name, clock)
        self._registry = self._membership.registry
        self._breakers = Breakers(config.breaker, clock)
        opener = proving(opener_for(config.access.tls), config.access.secret)
        self._pools = Pools(self._registry, self._breakers, config.channel, opener)
        self._halt = Halt()
        card = load_model_card(config.model_dir, config.model_name)
        metrics = RouterMetrics(config.model_name, self._sample_workers, self._count_requests)
        RegistryMetrics(metrics.registry, lambda: not self._registry.problem, lambda: self._membership.num_refused)
        series = AdmissionSeries(metrics.registry)
        self._admission = Admission(config.admission, clock, series.shed)
        series.watch_queue(lambda: self._admission.backlog.tokens, lambda: self._admission.backlog.wait_s)
        series.watch_places(lambda: self._admission.num_places)
        self._registry.subscribe(lambda _: self._follow_capacity())
        self._limits = RateLimits(
            config.limits, buckets(self._membership.link, clock, series.local_limits), series.limited
        )
        book = PairBook(config.canary, clock)
        self._registry.subscribe(book.on_change)
        self.placement = Placement(config.policies, PolicyMetrics(metrics.registry), clock, (config.channel, opener))
        chooser = self.placement.chooser(self._pools, book, self._registry)
        budget = RetryBudget(config.retry.budget, clock)
        means = Means(self._pools, chooser, clock, config.retry, new_id, self._halt, book, budget)
        self._canary = Canary(means, book, config.canary, metrics)
        self._health = Health(self._registry, chooser, book, self._admission, self._breakers)
        self._resilience = ResilienceMetrics(metrics.registry, self._breakers.samples, lambda: budget.num_refused)
        self._breakers.on_open = self._resilience.breaker_opened
        metrics.watch_bad_pairs(lambda: len(chooser.bad_pairs()))
        metrics.watch_pairs(book.shares)
        metrics.measure_by(config.slo.limits)
        self._templates = TemplateProcesses()
        self._prompter = Prompter(card, self._templates)
        ways, cached = DecisionMetrics(metrics.registry), self.placement.prompts.cached_tokens
        advisor = Advisor(config.disaggregation, clock, self._pools.loads, cached, ways)
        self._registry.subscribe(advisor.on_change)
        flow = Flow(means, metrics, advisor)
        self._registry.subscribe(flow.on_change)
        gate = Gate(self._admission, self._limits, Admission(READERS, clock, series.shed))
        service = Inference(self._prompter, gate, flow, self._registry, clock, metrics)
        service.tracing = self._tracing = open_tracing(config.tracing, new_id())
        service.listen = heard if config.access.log_prompts else unheard
        limits = FrontLimits(config.http.max_body_bytes, config.request_timeout_s)
        rules = ChatRules(card, config.chat)
        front = HttpFront(service, self._health.report, metrics, limits, new_id, rules)
        self._board = Board(config.model_name, config.slo, self._registry, self._count_requests, clock)
        self._board.troubles = self._health.troubles
        service.ended = self._board.history.ended
        metrics.pass_gaps(self._board.history.delivered)
        front.show(DashboardFront(self._board))
        self._doors = Doors(config)
        self._doors.watch_refusals(self._resilience.call_refused)
        self._doors.measure(metrics.registry)
        servicer = InferenceServicer(service, rules, config.request_timeout_s, new_id, self._doors.doorkeeper)
        self._doors.serve(front.app, servicer, RegistryServicer(self._registry))
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Ports:
        """Open the doors. Raises ConfigError when a port is busy; then nothing stays open."""
        ports = await self._doors.start()
        self._membership.start()
        upkeep = {"housekeeping": self._keep_house, "canary": self._canary.run, "dashboard": self._board.run}
        if self._membership.link is not None:
            keep_s = 2 * self._config.breaker.max_open_s  # longer than any rest: what opens again after it says so anew
            news = BreakerNews(self._membership.link, self._clock, new_id(), self._breakers.warn, keep_s)
            self._breakers.on_trip.append(news.tripped)
            upkeep["breaker news"] = news.run
        self._resilience.watch_tasks(upkeep)
        restarted = self._resilience.task_restarted
        self._tasks = [_watched(name, kept_up(name, make, self._clock, restarted)) for name, make in upkeep.items()]
        config = self._config
        log.info(
            "ready",
            model=config.model_name,
            http=join_address(config.http.host, ports.http),
            grpc=join_address(config.grpc.host, ports.grpc),
        )
        return ports

    async def warm_up(self) -> None:
        """Do now what the first request would wait for."""
        await self._prompter.warm_up()

    async def drain(self) -> None:
        """Refuse new requests; return when the running ones have ended."""
        self._admission.close()
        self._canary.stop()
        await self._doors.set_serving(False)
        await self._admission.wait_idle()

    async def stop(self) -> None:
        """Close both doors, end what still runs with a last word, give everything back. Idempotent."""
        self._halt.now()
        self._board.close()
        self._admission.halt(Unavailable("this router is stopping"))
        tasks, self._tasks = self._tasks, []
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._doors.stop(1.0)
        await self._limits.close()
        await self._templates.close()
        await self.placement.close()
        await self._pools.close()
        await self._membership.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close, _LAST_SPANS_S)

    async def _keep_house(self) -> None:
        """Forget silent workers, move requests away from stalled ones, let gRPC health follow whether one can be served."""
        while True:
            self._registry.expire()
            self._follow_capacity()
            relieve(self._registry, self._pools)
            reprieve(self._registry, self._pools)
            self._doors.refresh()
            await self._doors.set_serving(self._health.report().servable)
            await self._clock.sleep(min(self._config.registry.ttl_s / _EXPIRY_CHECKS_PER_TTL, _HEALTH_CHECK_S))

    def _follow_capacity(self) -> None:
        self._admission.resize(places_for(worker.info for worker in self._registry.ready(WorkerKind.DECODE)))

    def _sample_workers(self) -> list[WorkerSample]:
        return [
            WorkerSample(
                worker_id=w.info.ref.worker_id,
                pool=w.info.kind.value,
                state="suspect" if w.suspect else w.load.state.value,
                epoch=w.info.ref.epoch,
                num_running=w.load.num_running,
                num_waiting=w.load.num_waiting,
                num_queued_tokens=w.load.num_queued_tokens,
                kv_usage=w.load.kv_usage,
            )
            for w in self._registry.workers()
        ]

    def _count_requests(self) -> tuple[int, int]:
        return self._admission.num_running, self._admission.num_waiting


def _watched(name: str, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
    """A task whose death is not silent."""

    def ended(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            log.error("a task of this router died", error, task=name)

    task = asyncio.ensure_future(work)
    task.add_done_callback(ended)
    return task


def new_id() -> str:
    """Unique for ever."""
    return os.urandom(16).hex()
