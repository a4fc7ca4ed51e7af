"""A loaded cluster, a real Prometheus that scraped it, and every query of every dashboard and rule: each returns data.

Two prefill workers, two decode workers and a router are processes that share a secret. Requests go both ways, are repeated
(caches), are too many at once (shed), over their caller's limit, lose a decode worker to SIGKILL and a prefill worker to SIGTERM,
which sends what it has elsewhere at once; a plug-in policy fails now and then, a stranger calls. Then all is asked.
"""

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import grpc
import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from contracts.pb.diptych.v1 import handoff_pb2, handoff_pb2_grpc, registry_pb2, registry_pb2_grpc
from contracts.secret import ClusterSecret
from dashboard.slo import SloConfig
from router.config import (
    AccessConfig,
    AdmissionConfig,
    CanaryConfig,
    DisaggregationConfig,
    LimitsConfig,
    PolicyConfig,
    RouterConfig,
)
from rpc.channel import open_channel
from rpc.lifecycle import LifecycleConfig
from tests.integration.processes.children import Child, Config, Nursery
from tests.integration.processes.client import Answer, Question, question
from tests.integration.processes.cluster import WORKERS, Cluster, Setup
from tests.monitoring.prometheus_process import SCRAPE_S, PrometheusProcess, binary
from tests.monitoring.queries import (
    DASHBOARDS,
    Query,
    filled,
    panels,
    queries,
    selectors,
    summed_over_lifetimes,
    uncompared,
    variables,
)

pytestmark = [pytest.mark.slow]

WITH_TLS_ONLY = "router / Certificate / {{instance}}"  # nothing otherwise; when it expires is exported as 0 then
LIMITS = LimitsConfig(requests_per_minute=90)  # all of them at once, if one likes
SECRET = ClusterSecret(b"known to all processes of the cluster")
STUMBLES = """
from router.policies import PrefixAware

class Stumbles(PrefixAware):
    asked = 0

    def choose(self, candidates, query):
        self.asked += 1
        if self.asked % 7 == 0:
            raise RuntimeError("the seventh time")
        return super().choose(candidates, query)
"""


@dataclass
class Seen:
    """What there is to ask afterwards."""

    prometheus: PrometheusProcess
    begin: float
    end: float
    kinds: dict[str, str]  # of every series that a process exports, by its name

    def nothing(self, asked: list[Query]) -> list[str]:
        """Which of these return nothing at all over the whole time."""
        return [
            f"{query.place}: {query.expr}"
            for query in asked
            if not self.prometheus.values(query.expr, self.begin, self.end)
        ]

    def query(self, place: str) -> str:
        """What is asked there."""
        (expr,) = (query.expr for path in DASHBOARDS for query in queries(path) if query.place == place)
        return filled(expr)


class Watched(Cluster):
    """Its router chooses the way itself, has few places and a short queue, and proves its pairs often."""

    def config(self, name: str) -> Config:
        """See Cluster."""
        config = super().config(name)
        if isinstance(config, RouterConfig):
            return replace(
                config,
                admission=AdmissionConfig(max_running=12, max_waiting=4),
                limits=LIMITS,
                disaggregation=DisaggregationConfig(),
                access=AccessConfig(secret=SECRET),
                policies=PolicyConfig(decode="stumbles"),
                slo=SloConfig(ttft_s=0.05, e2e_s=60.0),
            )
        lifecycle = LifecycleConfig(finish_share=0.0)
        return replace(config, worker=replace(config.worker, secret=SECRET, lifecycle=lifecycle))

    def targets(self) -> dict[str, list[str]]:
        """What Prometheus is to scrape, for each job."""
        out = {"diptych-router": [f"127.0.0.1:{self.doors['router'].ports['http'].port}"]}
        for pool in ("prefill", "decode"):
            ports = [self.doors[name].ports["metrics"].port for name in WORKERS if name.startswith(pool)]
            out[f"diptych-{pool}"] = [f"127.0.0.1:{port}" for port in ports]
        return out

    async def reached(self, worker: str, answers: list[Answer]) -> bool:
        """Whether one of these is with this prefill worker, or was."""
        return any(to == worker for answer in answers for to, _ in self.routes.get(answer.question.prompt, ()))

    async def serve(self, rounds: range, *, busy: int = 8) -> None:
        """Questions, `busy` at once, each asked twice, half of them on one worker alone."""
        for number in rounds:
            asked = [ways(question(f"load {number} {i // 2}", 40 + 20 * i, 20, seeded=True), i) for i in range(busy)]
            answers = [self.client.ask(one) for one in asked]
            for answer in answers:
                await answer.end(self.patience_s)


@dataclass(frozen=True)
class Directed(Question):
    """A question that says which way it goes."""

    route: str

    @property
    def body(self) -> dict[str, object]:
        return {**super().body, "diptych": {"route": self.route}}


def ways(asked: Question, number: int) -> Question:
    """Every fourth over two pools, every fourth on one worker, the others as the router likes."""
    route = {0: "disaggregated", 1: "colocated"}.get(number % 4)
    return asked if route is None else Directed(asked.prompt, asked.max_tokens, asked.seed, route)


async def seen_by(server: PrometheusProcess, made: Watched, query: str) -> None:
    """Wait until Prometheus has series to give for it."""
    await made.until(partial(asyncio.to_thread, answers, server, query), query)


async def scene(made: Watched, server: PrometheusProcess) -> None:
    """All that happens to the cluster. Its dead are replaced when Prometheus has missed them."""
    await made.serve(range(3))
    await made.serve(range(1, 3))  # again
    crowd = [made.client.ask(question(f"crowd {i}", 200, 24, seeded=False)) for i in range(24)]
    for answer in crowd:
        await answer.end(made.patience_s)
    assert {answer.status for answer in crowd} == {200, 429}
    long = [made.client.ask(ways(question(f"long {i}", 120, 160, seeded=True), 0)) for i in range(8)]
    for answer in long:
        await answer.until(lambda a: len(a.token_ids) > 8, made.patience_s)
    more = [made.client.ask(ways(question(f"more {i}", 800, 8, seeded=True), 0)) for i in range(4)]
    await made.until(partial(made.reached, "prefill-1", more), "a prompt is at the worker that will drain")
    made.children["prefill-1"].signal(signal.SIGTERM)
    made.children["decode-0"].signal(signal.SIGKILL)
    for answer in long + more:
        await answer.end(made.patience_s)
    for name in ("decode-0", "prefill-1"):
        await made.children[name].ended.wait()
    for alert in ("DiptychProcessDown", "DiptychWorkerLost", "DiptychShedding"):
        await seen_by(server, made, f'ALERTS{{alertname="{alert}"}}')
    await strangers_call(made)
    await made.whole()
    over = [made.client.ask(question(f"over {i}", 20, 1, seeded=False)) for i in range(60)]
    for answer in over:
        await answer.end(made.patience_s)
    assert 429 in {answer.status for answer in over}


async def strangers_call(made: Watched) -> None:
    """Somebody without the secret asks a worker for room, and announces itself to the router."""
    async with open_channel(made.doors["decode-1"].ports["grpc"].local_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await handoff_pb2_grpc.HandoffStub(channel).Reserve(handoff_pb2.ReserveRequest())
    async with open_channel(made.doors["router"].ports["grpc"].local_address) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await registry_pb2_grpc.RegistryStub(channel).Announce(registry_pb2.AnnounceRequest())


def offer_policy(folder: Path) -> None:
    """A package whose policy fails every seventh time, as pip would have installed it."""
    (folder / "stumbles.py").write_text(STUMBLES)
    package = folder / "stumbles-1.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: stumbles\nVersion: 1\n")
    (package / "entry_points.txt").write_text("[diptych.policies]\nstumbles = stumbles:Stumbles\n")


async def exported(targets: dict[str, list[str]]) -> dict[str, str]:
    """The kind of every series that some process exports, by its name as a query says it."""
    kinds = {"up": "gauge"}
    endings = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}
    async with httpx.AsyncClient(trust_env=False) as http:
        for target in (target for of_job in targets.values() for target in of_job):
            for family in text_string_to_metric_families((await http.get(f"http://{target}/metrics")).text):
                for ending in endings.get(family.type, ("",)):
                    kinds[family.name + ending] = family.type
    return kinds


class Late:
    """Starts processes as the nursery that `begin` gives, which the first order asks: when all ports are known."""

    def __init__(self, begin: Callable[[], Awaitable[Nursery]]) -> None:
        self._begin = begin
        self._nursery: Nursery | None = None

    async def start(self, name: str, config: Config) -> Child:
        """See Starter."""
        if self._nursery is None:
            self._nursery = await self._begin()
        return await self._nursery.start(name, config)


async def played(folder: Path, servers: list[PrometheusProcess]) -> tuple[float, float, dict[str, str]]:
    """Begin and end (Unix time) of what Prometheus saw, and what there was to see. The server is left in `servers`.

    It looks at targets for the first time five seconds after its start; meanwhile the nursery imports what workers need.
    """
    async with AsyncExitStack() as stack:

        async def begin() -> Nursery:
            servers.append(PrometheusProcess(folder, made.targets()))
            nursery, _ = await asyncio.gather(
                stack.enter_async_context(Nursery(folder)), asyncio.to_thread(servers[0].start)
            )
            stack.push_async_callback(made.end)  # while the nursery is there to say who has ended
            return nursery

        made = Watched(Setup("tcp", canary=CanaryConfig(interval_s=1.0, spacing_s=0.2)), Late(begin))
        await made.open(stack)
        begun = time.time()
        await seen_by(servers[0], made, "count(up == 1) == 5")
        await scene(made, servers[0])
        # What was counted for the first time a moment ago has a rate once it was scraped twice.
        await seen_by(servers[0], made, "rate(diptych_rate_limited_requests_total[2s])")
        await asyncio.sleep(4 * SCRAPE_S)  # a range is asked at steps, of which some must be after that
        return begun, time.time(), await exported(made.targets())


def answers(server: PrometheusProcess, query: str) -> bool:
    """Whether there are series now."""
    return server.get("query", query=query)["result"] != []


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """The cluster is gone when tests run; Prometheus is there and remembers it."""
    binary("prometheus")
    servers: list[PrometheusProcess] = []
    folder = tmp_path_factory.mktemp("monitoring")
    offer_policy(folder)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("PYTHONPATH", str(folder), prepend=":")
            begin, end, kinds = asyncio.run(played(folder, servers))
        yield Seen(servers[0], begin, end, kinds)
    finally:
        for server in servers:
            server.stop()


def rules(seen: Seen) -> list[Query]:
    """All recording and alert rules, as Prometheus has read them."""
    groups = seen.prometheus.get("rules")["groups"]
    return [Query(rule["name"], rule["query"]) for group in groups for rule in group["rules"]]


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_every_query_of_every_panel_returns_data(seen, path):
    asked = [Query(query.place, filled(query.expr)) for query in queries(path) + variables(path)]
    asked = [replace(q, expr=uncompared(q.expr)) if q.place == WITH_TLS_ONLY else q for q in asked]
    assert seen.nothing(asked) == []


@pytest.mark.parametrize("path", DASHBOARDS, ids=lambda path: path.stem)
def test_what_panels_show_can_be_what_their_units_say(seen, path):
    """No share is below 0 or far over 1 (rates of a second are extrapolated), no time is longer than all of it took."""
    bounds = {"percentunit": 1.25, "s": 60.0, "reqps": 1e3, "Bps": 1e9, "bytes": 4e9}
    strange = []
    for panel in panels(path):
        most = bounds.get(panel.get("fieldConfig", {}).get("defaults", {}).get("unit"), float("inf"))
        for target in panel.get("targets", ()):
            shown = seen.prometheus.values(filled(target["expr"]), seen.begin, seen.end)
            strange += [(panel["title"], v) for series in shown for v in series if not 0 <= v <= most]
    assert strange == []


def test_every_rule_is_evaluated_and_has_something_to_compare(seen):
    asked = [Query(rule.place, uncompared(rule.expr)) for rule in rules(seen)]
    assert len(asked) >= 28
    assert seen.nothing(asked) == []
    groups = seen.prometheus.get("rules")["groups"]
    assert [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"] == []


def test_no_query_names_what_no_process_exports_or_takes_a_count_for_a_rate(seen):
    recorded = {rule.place for rule in rules(seen)}
    counted = {name for name, kind in seen.kinds.items() if kind in ("counter", "histogram")}
    asked = [query for path in DASHBOARDS for query in queries(path) + variables(path)]
    unknown, lifetime = [], []
    for query in asked + rules(seen):
        unknown += [(query.place, s.name) for s in selectors(query.expr) if s.name not in seen.kinds.keys() | recorded]
        if "/ variable /" not in query.place:
            lifetime += [(query.place, name) for name in summed_over_lifetimes(query.expr, counted)]
    assert unknown == []
    assert lifetime == []


def test_what_was_done_to_the_cluster_is_seen_in_numbers(seen):
    """Not only that there are series: that they say what happened."""

    def most(query: str) -> float:
        return max((max(numbers) for numbers in seen.prometheus.values(query, seen.begin, seen.end)), default=0.0)

    assert most("sum(changes(diptych_worker_epoch[1m]))") >= 2  # two workers have a new life
    assert most('sum(increase(diptych_shed_requests_total{reason="full"}[30s]))') > 0
    assert most("sum(diptych_rate_limited_requests_total)") > 0
    for shown in (  # the first of its kind too, which a series that comes with it hides from rate()
        "handoff / Attempts that failed / {{code}}",
        "handoff / Attempts that moved on / {{when}}",
        "handoff / Migrations and retries / retried",
        "router / Policy faults / {{pool}} {{policy}}",
        "pools / Prompt tokens found in a cache / measured",
        "overview / Sent away (429, 401) / shed: {{reason}}",
        "overview / Sent away (429, 401) / limit: {{kind}}",
        "overview / Requests that missed a promise / {{slo}}",
        "overview / Failed or sent away / 5 min",
    ):
        assert most(seen.query(shown)) > 0, shown
    assert most(seen.query("router / Tasks that died, calls that were refused / call: {{job}} {{method}}")) == 1
    assert most("count(count by (job) (diptych_refused_calls_total))") == 2  # a worker and the router
    assert most('count(diptych_router_task_restarts_total{task=~"housekeeping|canary|dashboard"} == 0)') == 3
    assert most("sum(diptych_handoffs_total)") > 10
    assert most('count(diptych_workers{state="ready"})') == 2
    assert most('count(up{job=~"diptych-.+"} == 0)') >= 1
    assert most('count(up{job=~"diptych-.+"} == 1)') == 5
