"""What is looked at from outside: the router's word, workers' own numbers, containers as Docker knows them."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable

import httpx
from prometheus_client.parser import text_string_to_metric_families

from tests.compose.journal import NotSo
from tests.compose.stack import Stack

LOOK_S = 0.1
WORK_TOKENS = 50


async def until(condition: Callable[[], Awaitable[bool]], what: str, limit_s: float) -> float:
    """Seconds until it held; NotSo when it did not in time."""
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > limit_s:
            raise NotSo(f"not within {limit_s:g} s: {what}")
        await asyncio.sleep(LOOK_S)
    return time.monotonic() - began


async def fetched(url: str) -> str:
    """The body, whatever the status; "" when nobody answers."""
    try:
        async with httpx.AsyncClient(trust_env=False, timeout=3) as http:
            return (await http.get(url)).text
    except httpx.HTTPError:
        return ""


class Watch:
    """Of one stack."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._url = f"http://127.0.0.1:{stack.ports['HTTP_PORT']}"

    async def health(self) -> dict:
        """The router's word; {} when it says nothing."""
        said = await fetched(f"{self._url}/health")
        return json.loads(said) if said else {}

    async def ready(self, prefill: int, decode: int) -> bool:
        """Whether the router would choose from so many workers."""
        found = (await self.health()).get("ready", {})
        return (found.get("prefill"), found.get("decode")) == (prefill, decode)

    async def until_ready(self, prefill: int, decode: int, limit_s: float = 60.0) -> float:
        """Seconds until it would."""
        return await until(lambda: self.ready(prefill, decode), f"{prefill} prefill and {decode} decode ready", limit_s)

    async def numbers(self, container: str, name: str, **labels: str) -> float:
        """The sum of all series of this name (of a counter: without _total) with these labels that the worker exports."""
        text = await fetched(f"http://{await self._stack.address(container)}:9100/metrics")
        families = [family for family in text_string_to_metric_families(text) if family.name == name]
        samples = [s for family in families for s in family.samples if not s.name.endswith("_created")]
        return sum(s.value for s in samples if labels.items() <= s.labels.items())

    async def until_at_work(self, containers: list[str], limit_s: float = 60.0) -> float:
        """Seconds until each of these workers has computed more from now on than the router's own probes ask for."""
        name = "diptych_engine_scheduled_tokens"
        before = {container: await self.numbers(container, name) for container in containers}

        async def all_work() -> bool:
            return all([await self.numbers(one, name) >= before[one] + WORK_TOKENS for one in containers])

        return await until(all_work, f"{WORK_TOKENS} tokens computed by each of {len(containers)} workers", limit_s)

    async def busy(self, containers: list[str]) -> str:
        """One that has a running request; "" for none."""
        for container in containers:
            if await self.numbers(container, "vllm:num_requests_running") > 0:
                return container
        return ""

    async def state(self, container: str) -> dict:
        """Docker's."""
        return (await self._stack.inspect(container))["State"]
