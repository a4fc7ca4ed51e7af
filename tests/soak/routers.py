"""The routers of one deployment as a balancer in front of them sees them: which may be asked, and who was asked in vain.

    ask ─▶ the next router in turn whose /health says that it serves ─▶ Heard, excused when that router itself was gone

Does not know why a router is gone.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import httpx

from tests.soak.asking import Asker, Heard, Outcome, open_asker
from tests.soak.plan import Planned, Question

LOOK_S = 0.2
PATIENCE_S = 2.0  # who says nothing for so long is gone: keep-alives of its clients may give it up as well
WAIT_S = 20.0


class Routers:
    """Asks them in turn; `open_routers` makes it."""

    def __init__(self, askers: Mapping[str, Asker], urls: Mapping[str, str]) -> None:
        """Both by name."""
        self._askers, self.urls = askers, urls
        self._open = dict.fromkeys(askers, True)
        self._gone_at: dict[str, float] = {}
        self._turn = 0

    @property
    def first(self) -> Asker:
        """The one that a soak of a single router asks."""
        return next(iter(self._askers.values()))

    def serves(self, name: str) -> bool:
        """What it said last."""
        return self._open[name]

    async def ask(self, question: Question, planned: Planned) -> tuple[str, Heard, bool]:
        """(router, what was heard of it, whether a failure is excused: the router was gone in that time)."""
        name, begun = await self._next(), time.monotonic()
        heard = await self._askers[name].ask(question, planned)
        if heard.outcome is Outcome.FAILED and len(self._askers) > 1:
            await asyncio.sleep(LOOK_S + PATIENCE_S)  # it has been looked at since
        return name, heard, self._gone_at.get(name, -1.0) >= begun

    async def wait_all_serve(self, limit_s: float) -> bool:
        """Whether all do within this time."""
        give_up = time.monotonic() + limit_s
        while not all(self._open.values()) and time.monotonic() < give_up:
            await asyncio.sleep(LOOK_S)
        return all(self._open.values())

    async def watch(self) -> None:
        """Look at every router for ever, each at its own pace: who waits for one that stands still overlooks another's end."""
        async with httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as client:
            await asyncio.gather(*(self._keep_looking(client, name, url) for name, url in self.urls.items()))

    async def _keep_looking(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        while True:
            await self._look(client, name, url)
            await asyncio.sleep(LOOK_S)

    async def _look(self, client: httpx.AsyncClient, name: str, url: str) -> None:
        try:
            said = await client.get(f"{url}/health")
        except httpx.TransportError:
            self._open[name], self._gone_at[name] = False, time.monotonic()
        else:
            self._open[name] = said.status_code == httpx.codes.OK

    async def _next(self) -> str:
        """The next in turn that serves; any when none does for long."""
        names, give_up = list(self._askers), time.monotonic() + WAIT_S
        while True:
            self._turn += 1
            for i in range(len(names)):
                name = names[(self._turn + i) % len(names)]
                if self._open[name] or time.monotonic() > give_up:
                    return name
            await asyncio.sleep(LOOK_S)


@asynccontextmanager
async def open_routers(addresses: Mapping[str, tuple[str, str]], model: str) -> AsyncIterator[Routers]:
    """Of name → (HTTP URL, gRPC address); returns when all can be reached. Several are watched."""
    async with AsyncExitStack() as stack:
        askers = {
            name: await stack.enter_async_context(open_asker(http, grpc, model))
            for name, (http, grpc) in addresses.items()
        }
        routers = Routers(askers, {name: http for name, (http, _) in addresses.items()})
        watching = asyncio.create_task(routers.watch()) if len(addresses) > 1 else None
        try:
            yield routers
        finally:
            if watching is not None:
                watching.cancel()
                await asyncio.wait((watching,))
