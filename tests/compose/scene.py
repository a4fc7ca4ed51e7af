"""What happens to the cluster, and what must be so meanwhile and afterwards. Each step begins and ends with all workers well."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass

from tests.compose.journal import Journal, NotSo
from tests.compose.panels import OF_OTHERS, Prometheus
from tests.compose.questions import LONGEST, PATIENCE_S, PROMPTS, Asked, Load, judged, right
from tests.compose.stack import PROJECT, Stack
from tests.compose.watching import Watch, fetched, until
from tests.integration.processes.client import Answer, Client

STREAMS = 4
LONG = Asked(PROMPTS[2], LONGEST)


@dataclass
class Scene:
    """All that a step needs."""

    stack: Stack
    journal: Journal
    client: Client
    watch: Watch
    truth: dict[str, list[int]]
    begun: float  # Unix time

    def load(self) -> Load:
        """Clients, for as long as it is entered."""
        return Load(self.client, self.truth, STREAMS)

    async def begun_somewhere(self, service: str) -> tuple[Answer, str]:
        """A long answer that has begun, and the container of `service` that makes it."""
        containers, found = await self.stack.containers(service), ""
        answer = self.client.ask(LONG)
        await answer.until(lambda a: len(a.token_ids) >= 8, PATIENCE_S)

        async def seen() -> bool:
            nonlocal found
            found = await self.watch.busy(containers)
            return found != ""

        await until(seen, f"a container of {service} that runs the answer", 15)
        if answer.over:
            raise NotSo("the answer was over before anything could happen to it")
        return answer, found

    async def goes_on(self, answer: Answer) -> str:
        """The answer once it is whole, in words; NotSo unless it is the right one."""
        had = len(answer.token_ids)
        await answer.end(PATIENCE_S)
        wrong = judged(answer, self.truth)
        if wrong:
            raise NotSo(wrong)
        return f"had {had} of {LONGEST} tokens, the same text, longest pause {answer.longest_wait_s:.1f} s"


async def answers(scene: Scene) -> None:
    """Through the published port, over both ways, the words of the engine alone."""
    for route in ("disaggregated", "colocated"):
        with scene.journal.check(f"{len(PROMPTS)} answers, {route}: the tokens of `diptych generate`") as line:
            got = [await right(scene.client, Asked(p, 48, route), scene.truth) for p in PROMPTS]
            line.said = f"{sum(len(one.token_ids) for one in got)} tokens"
    with scene.journal.check("KV went from container to container over tcp") as line:
        (prefill,) = await scene.stack.containers("prefill")
        sent = await scene.watch.numbers(prefill, "diptych_kv_sent_bytes", connector="tcp")
        line.said = f"{sent / 2**20:.0f} MiB"
        assert sent > sum(map(len, PROMPTS)) / 8 * 23040  # 22.5 KiB a token, eight characters or fewer each


async def scaled(scene: Scene) -> None:
    """From 1 and 1 to 2 and 3 while clients ask: nobody fails, and the new workers get work."""
    with scene.journal.check("--scale prefill=2 --scale decode=3 under load: traffic moves, no answer fails") as line:
        async with scene.load() as load:
            await asyncio.sleep(3)
            began = time.monotonic()
            await scene.stack.scale(prefill=2, decode=3)
            await scene.watch.until_ready(2, 3)
            took_s = time.monotonic() - began
            workers = [c for pool in ("prefill", "decode") for c in await scene.stack.containers(pool)]
            moved_s = await scene.watch.until_at_work(workers)
        line.said = f"ready after {took_s:.0f} s, all five at work {moved_s:.1f} s later; {load.must_be_right()}"


async def killed(scene: Scene) -> None:
    """SIGKILL of the container that writes an answer; then of the processes in another, which Docker starts again."""
    with scene.journal.check("kill -9 a decode container in mid-answer: the answer goes on") as line:
        answer, container = await scene.begun_somewhere("decode")
        await scene.stack.docker("kill", "--signal", "KILL", container)
        line.said = await scene.goes_on(answer)
        gone_s = await scene.watch.until_ready(2, 2)
        await scene.stack.docker("start", container)
        line.said += f"; missed after {gone_s:.1f} s, back {await scene.watch.until_ready(2, 3):.1f} s after its start"
    with scene.journal.check(
        "a decode worker crashes in mid-answer: it goes on, and Docker starts the worker again"
    ) as line:
        answer, container = await scene.begun_somewhere("decode")
        await scene.stack.docker("exec", container, "python", "-c", "import os; os.kill(-1, 9)", well=False)
        line.said = await scene.goes_on(answer)
        line.said += f"; all ready {await scene.watch.until_ready(2, 3):.1f} s later"
        assert (await scene.stack.inspect(container))["RestartCount"] == 1


async def cut_off(scene: Scene) -> None:
    """A prefill worker leaves the network and comes back."""
    with scene.journal.check("docker network disconnect a prefill worker, and connect it again, under load") as line:
        container = (await scene.stack.containers("prefill"))[0]
        network, alias = f"{PROJECT}_cluster", "prefill"
        async with scene.load() as load:
            await asyncio.sleep(1)
            await scene.stack.docker("network", "disconnect", network, container)
            missed_s = await scene.watch.until_ready(1, 3)
            await asyncio.sleep(3)
            await scene.stack.docker("network", "connect", "--alias", alias, network, container)
            back_s = await scene.watch.until_ready(2, 3)
            works_s = await scene.watch.until_at_work([container])
        line.said = f"missed after {missed_s:.1f} s, back after {back_s:.1f} s, at work {works_s:.1f} s later; "
        line.said += load.must_be_right()


async def paused(scene: Scene) -> None:
    """A decode worker stops moving in the middle of an answer, and moves again."""
    with scene.journal.check(
        "docker pause the decode worker of an answer, and unpause: the answer goes on elsewhere"
    ) as line:
        answer, container = await scene.begun_somewhere("decode")
        await scene.stack.pause(container)
        try:
            line.said = await scene.goes_on(answer)
        finally:
            await scene.stack.docker("unpause", container)
        line.said += f"; ready again {await scene.watch.until_ready(2, 3):.1f} s after unpause"


async def redis_restarted(scene: Scene) -> None:
    """The registry is away, and has forgotten everything when it is back."""
    with scene.journal.check(
        "docker compose restart redis under load: no answer fails, workers are known again"
    ) as line:
        async with scene.load() as load:
            await asyncio.sleep(1)
            await scene.stack.compose("stop", "redis")

            async def noticed() -> bool:
                return (await scene.watch.health()).get("registry") != "ok"

            noticed_s = await until(noticed, "the router says that Redis is away", 30)
            await asyncio.sleep(8)  # longer than a lease
            assert await scene.watch.ready(2, 3), await scene.watch.health()
            await scene.stack.compose("start", "redis")

            async def well() -> bool:
                return (await scene.watch.health()).get("registry") == "ok" and await scene.watch.ready(2, 3)

            back_s = await until(well, "the registry is there with five workers", 60)
            await asyncio.sleep(6)  # what it was told before is not believed any more
            assert await scene.watch.ready(2, 3), await scene.watch.health()
        line.said = f"noticed after {noticed_s:.1f} s, five workers known {back_s:.1f} s after its start; "
        line.said += load.must_be_right()


async def shrunk(scene: Scene) -> None:
    """Workers that are taken away drain: nobody fails, none is killed."""
    with scene.journal.check("--scale prefill=1 --scale decode=1 under load: workers drain, no answer fails") as line:
        async with scene.load() as load:
            await asyncio.sleep(1)
            began = time.monotonic()
            await scene.stack.scale(prefill=1, decode=1)
            line.said = f"{time.monotonic() - began:.1f} s (killed after 40); "
            await scene.watch.until_ready(1, 1)
            await asyncio.sleep(2)
        line.said += load.must_be_right()


async def rolled(scene: Scene) -> None:
    """A setting changed without a gap, as docs/compose.md tells: new workers beside the old ones, then instead of them."""
    stack, changed = scene.stack, {"DECODE_FLAGS": "--max-num-seqs 32"}
    up = ("up", "-d", "--no-build", "--wait", "--wait-timeout", "300")
    with scene.journal.check("another setting, rolled: new workers come, then old ones go, no answer fails") as line:
        async with scene.load() as load:
            old = await stack.containers("decode")
            await stack.compose(*up, "--no-recreate", f"--scale=decode={2 * len(old)}", **changed)
            await scene.watch.until_ready(1, 2 * len(old))
            await stack.docker("stop", *old)
            await stack.docker("rm", *old)
            await stack.compose(*up, **changed)
            await scene.watch.until_ready(1, len(old))
            now = await stack.containers("decode")
        line.said = load.must_be_right()
        assert len(now) == len(old) and set(now).isdisjoint(old)


async def too_many(scene: Scene) -> None:
    """More than may wait: some are sent away at once, all others are right."""
    with scene.journal.check("a crowd: who cannot wait gets 429, all others the right answer") as line:
        crowd = [scene.client.ask(Asked(PROMPTS[n % len(PROMPTS)], 16)) for n in range(40)]
        for answer in crowd:
            await answer.end(PATIENCE_S)
        served = [answer for answer in crowd if answer.status == 200]
        wrong = [judged(answer, scene.truth) for answer in served]
        line.said = f"{len(served)} served, {len(crowd) - len(served)} sent away"
        assert {answer.status for answer in crowd} == {200, 429}
        assert not any(wrong), wrong


async def seen(scene: Scene) -> None:
    """Prometheus found everything by name and has something for every panel; Grafana got its files."""
    prometheus = Prometheus(scene.stack.ports["PROMETHEUS_PORT"])
    with scene.journal.check("Prometheus scrapes what runs, found by DNS") as line:

        async def found() -> bool:
            return prometheus.up() == {"diptych-router": 1, "diptych-prefill": 2, "diptych-decode": 3}

        await until(found, "one router, two prefill, three decode workers up", 30)
        line.said = str(prometheus.up())
    with scene.journal.check("Prometheus evaluates every rule") as line:
        groups = prometheus.get("rules")["groups"]
        bad = [rule["name"] for group in groups for rule in group["rules"] if rule["health"] != "ok"]
        line.said = f"{sum(len(group['rules']) for group in groups)} rules"
        assert not bad, bad
    with scene.journal.check("Prometheus has data for every Grafana panel") as line:
        count, empty = prometheus.empty_panels(scene.begun)
        line.said = f"{count - len(empty)} of {count}; not, as it must be without TLS: {', '.join(OF_OTHERS)}"
        assert set(empty) <= OF_OTHERS, sorted(set(empty) - OF_OTHERS)
    with scene.journal.check("Grafana was given five dashboards") as line:
        listed = json.loads(await fetched(f"http://127.0.0.1:{scene.stack.ports['GRAFANA_PORT']}/api/search") or "[]")
        line.said = ", ".join(
            sorted(one["title"].split(" / ")[-1] for one in listed if one.get("uid", "").startswith("diptych"))
        )
        assert line.said.count(",") == 4


ONE_OF_EACH = (answers, scaled, rolled)  # begin with one worker of each pool
STEPS = (answers, scaled, killed, cut_off, paused, redis_restarted, too_many, seen)
