"""One soak from start to judgement.

    start ─▶ truth (one worker, one by one) ─▶ calm (both pools, all doors) ─▶ load + disturbances ─▶ all ready, idle
          ─▶ calm again ─▶ idle: books, descriptors, segments ─▶ SIGTERM ─▶ what is left over? ─▶ Findings

Does not know what is a violation.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from tests.soak.asking import HANG_S
from tests.soak.cluster import MODEL, Cluster, Size
from tests.soak.firm import firm_questions
from tests.soak.judging import Findings, Pause, Tally
from tests.soak.plan import Disturbance, Door, Kind, Planned, disturbances, questions, requests, shared_disturbances
from tests.soak.recording import Recorder
from tests.soak.routers import Routers, open_routers
from tests.soak.sharing import OTHER, REDIS, Sharing
from tests.soak.truth import Truth, differences, take_truth
from tests.soak.watching import left_over

VOCAB, LONGEST_PROMPT = 1024, 600
SAMPLE_S, LINE_S = 2.0, 10.0
IDLE_S = 60.0
BUSY, BUSY_S = 4, 2.0
_GAUGE = re.compile(r"^diptych_worker_kv_usage_ratio\{.*worker_id=\"((?:prefill|decode)-\d+)[^\"]*\".*\} (\S+)$", re.M)
_RUNNING = re.compile(r"^diptych_requests_(?:running|waiting) (\S+)$", re.M)


@dataclass(frozen=True, slots=True)
class SoakConfig:
    """How long and how hard."""

    minutes: float = 20.0
    seed: int = 1
    connector: str = "shm"
    shared: bool = False  # two routers and a Redis
    num_questions: int = 96
    rate_hz: float = 6.0
    at_once: int = 24
    disturb_every_s: float = 7.0
    size: Size = field(default_factory=Size)


class Soak:
    """See the module's docstring."""

    def __init__(self, config: SoakConfig, logs: Path) -> None:
        self._config = config
        self._logs = logs
        self._sharing = Sharing(logs) if config.shared else None
        flags = () if self._sharing is None else self._sharing.flags
        self._cluster = Cluster(config.connector, config.size, logs, flags)
        self._questions = questions(config.seed, config.num_questions, VOCAB, LONGEST_PROMPT)
        size = config.size
        self._workers = [f"prefill-{i}" for i in range(size.prefill)] + [f"decode-{i}" for i in range(size.decode)]
        self._truths: tuple[Truth, ...] = ()
        self._tally = Tally()
        self._running: set[asyncio.Task[None]] = set()
        self._recorder = Recorder(self._cluster, self._others)
        self._ended: dict[str, list[Kind]] = {}
        self._pauses: list[Pause] = []
        self.kinds: Counter[str] = Counter()
        self._begun = time.monotonic()

    @property
    def seconds(self) -> float:
        """Since the load began."""
        return time.monotonic() - self._begun

    async def run(self) -> Findings:
        """Everything; the cluster has ended when this returns or raises."""
        cluster, config = self._cluster, self._config
        self._questions = firm_questions(self._questions, MODEL)
        try:
            addresses = await self._start()
            async with open_routers(addresses, cluster.facts.model) as routers:
                print(f"truth of {len(self._questions)} questions", flush=True)
                self._truths = await take_truth(routers.first, self._questions)
                await self._calm(routers)
                await self._idle(routers)
                before = self._recorder.footprints()
                await self._load(routers, config.minutes * 60)
                all_ready = await cluster.wait_all_ready(IDLE_S) and await routers.wait_all_serve(IDLE_S)
                await self._calm(routers)
                running, kv_usage = await self._idle(routers)
            after = self._recorder.footprints()
            self._recorder.sample(self.seconds)
        finally:
            exit_code = await cluster.end()
            if self._sharing is not None:
                await self._sharing.end()
        await asyncio.sleep(1.0)
        self._recorder.write(self._logs / "memory.csv")
        (self._logs / "excused.txt").write_text("".join(f"{each}\n" for each in self._tally.excused))
        return Findings(
            tally=self._tally,
            all_ready=all_ready,
            running=running,
            kv_usage=kv_usage,
            workers=self._workers,
            ended_by_us=self._ended,
            endings=[*cluster.endings(), *(() if self._sharing is None else self._sharing.endings)],
            pauses=self._pauses,
            complaints=[*cluster.complaints(), *(() if self._sharing is None else self._sharing.complaints())],
            before=before,
            after=after,
            lives=self._recorder.lives(),
            left_over=left_over(self._recorder.seen),
            exit_code=exit_code,
        )

    async def _start(self) -> dict[str, tuple[str, str]]:
        """Start all that there is; the routers' HTTP URLs and gRPC addresses by name."""
        if self._sharing is not None:
            self._sharing.start_redis()
        await self._cluster.start()
        facts = self._cluster.facts
        addresses = {"router": (facts.http, facts.grpc)}
        if self._sharing is not None:
            self._sharing.start_router()
            addresses[OTHER] = (self._sharing.http, self._sharing.grpc)
        return addresses

    def _others(self) -> dict[str, int]:
        pid = None if self._sharing is None else self._sharing.pid
        return {} if pid is None else {OTHER: pid}

    async def _calm(self, routers: Routers) -> None:
        """Every question once over both pools, through every door in turn, a few at once."""
        doors = tuple(Door)
        asks: Iterable[Planned] = (Planned(0.0, i, doors[i % len(doors)]) for i in range(len(self._questions)))
        waiting = iter(asks)

        async def work() -> None:
            for planned in waiting:
                await self._ask(routers, planned, "calm")

        await asyncio.gather(*(work() for _ in range(4)))

    async def _ask(self, routers: Routers, planned: Planned, when: str) -> None:
        question, truth = self._questions[planned.question], self._truths[planned.question]
        router, heard, excused = await routers.ask(question, planned)
        name = f"{when} at {self.seconds:.1f} s, question {planned.question} by {planned.door} of {router}"
        wrong = differences(heard, truth)
        self._tally.add(name, heard, wrong, excused=excused)

    async def _load(self, routers: Routers, length_s: float) -> None:
        """Ask and disturb for this long, then wait for what is still running."""
        config = self._config
        self._begun = time.monotonic()
        victims = tuple(self._workers) if self._sharing is None else (*self._workers, "router")
        plan = disturbances(config.seed, victims, length_s, config.disturb_every_s)
        side = [
            asyncio.create_task(work) for work in (self._watch(), self._disturb(plan), self._disturb_shared(routers))
        ]
        slots = asyncio.Semaphore(config.at_once)

        async def one(planned: Planned) -> None:
            async with slots:
                await self._ask(routers, planned, "load")

        for planned in requests(config.seed, len(self._questions), config.rate_hz):
            await asyncio.sleep(planned.pause_s)
            if self.seconds >= length_s:
                break
            if slots.locked():  # the machine is slow just now: the clients wait, they do not pile up
                async with slots:
                    pass
            task = asyncio.create_task(one(planned))
            self._running.add(task)
            task.add_done_callback(self._running.discard)
            for each in side:
                if each.done():
                    each.result()
        await asyncio.gather(*side[1:])
        if self._running:
            await asyncio.wait(self._running, timeout=HANG_S + 10)
        side[0].cancel()
        await asyncio.wait(side)
        self._line()

    async def _disturb(self, plan: tuple[Disturbance, ...]) -> None:
        """Carry out the plan as far as the victims are up; returns when nobody is stopped any more."""
        pauses: list[asyncio.Task[None]] = []
        for planned in plan:
            await asyncio.sleep(max(0.0, planned.at_s - self.seconds))
            await self._busy()
            stopped = {pause.get_name() for pause in pauses if not pause.done()}
            settled = {name: self._cluster.settled(name) for name in planned.victims if name not in stopped}
            up = [(name, pid) for name, pid in settled.items() if pid is not None]
            if not up or not self._cluster.disturb(up[0][1], planned.kind):
                self.kinds["skipped"] += 1
                continue
            name, pid = up[0]
            self.kinds[planned.kind] += 1
            if planned.kind is Kind.STOP:
                self._pauses.append(Pause(name, time.time(), time.time() + planned.length_s))
                going_on = self._go_on(pid, planned.length_s)
                pauses.append(asyncio.create_task(going_on, name=name))
            else:
                self._ended.setdefault(name, []).append(planned.kind)
        for pause in pauses:
            await pause

    async def _disturb_shared(self, routers: Routers) -> None:
        """What the routers share, and the second of them, one after the other."""
        config, sharing = self._config, self._sharing
        if sharing is None:
            return
        plan = shared_disturbances(config.seed, REDIS, OTHER, config.minutes * 60, config.disturb_every_s)
        for planned in plan:
            await asyncio.sleep(max(0.0, planned.at_s - self.seconds))
            (victim,) = planned.victims
            if victim == OTHER and not routers.serves(OTHER):
                self.kinds["skipped"] += 1
                continue
            self.kinds[f"{victim} {planned.kind}"] += 1
            if victim == OTHER and planned.kind is not Kind.STOP:
                self._ended.setdefault(OTHER, []).append(planned.kind)
            await sharing.befall(planned)
            sharing.raise_if_dead()

    async def _busy(self) -> None:
        """Return when several requests run, but soon: to lose an idle worker is easy."""
        give_up = self.seconds + BUSY_S
        while len(self._running) < BUSY and self.seconds < give_up:
            await asyncio.sleep(0.01)

    async def _go_on(self, pid: int, after_s: float) -> None:
        await asyncio.sleep(after_s)
        self._cluster.go_on(pid)

    async def _watch(self) -> None:
        next_line = LINE_S
        while True:
            self._cluster.look()
            self._recorder.sample(self.seconds)
            if self.seconds >= next_line:
                next_line += LINE_S
                self._line()
            await asyncio.sleep(SAMPLE_S)

    def _line(self) -> None:
        tally, counts = self._tally, self._tally.outcomes
        outcomes = "  ".join(f"{outcome} {counts[outcome]}" for outcome in counts)
        kinds = " ".join(f"{kind} {self.kinds[kind]}" for kind in sorted(self.kinds))
        words = f"{outcomes}  wrong {len(tally.wrong)}  allowed {len(tally.allowed)}  at once {len(self._running)}"
        print(f"{self.seconds:6.0f} s  {words}  [{kinds}]  RSS {self._recorder.rss}", flush=True)

    async def _idle(self, routers: Routers) -> tuple[float, dict[str, float]]:
        """As `_idle_at` of every router: the sum of requests, and of the workers that all of them know the greater usage."""
        pages = [await self._idle_at(http) for http in routers.urls.values()]
        known = set(self._workers).intersection(*(usage for _, usage in pages))
        usages = {name: max(usage[name] for _, usage in pages) for name in known}
        return sum(running for running, _ in pages), usages

    async def _idle_at(self, http: str) -> tuple[float, dict[str, float]]:
        """(requests, KV usage by worker) once all are 0, or after IDLE_S what they still are."""
        give_up = time.monotonic() + IDLE_S
        async with httpx.AsyncClient(trust_env=False) as client:
            while True:
                page = ""
                with suppress(httpx.TransportError):
                    page = (await client.get(f"{http}/metrics", timeout=10)).text
                usage = {name: float(value) for name, value in _GAUGE.findall(page)}
                running = sum(float(value) for value in _RUNNING.findall(page))
                quiet = len(usage) == len(self._workers) and not any(usage.values()) and not running
                if quiet or time.monotonic() > give_up:
                    return running, usage
                await asyncio.sleep(0.5)
