"""Shares, priorities and bounds of keys over HTTP, in front of real workers, with the admission that a router has by default."""

import asyncio
import json
from contextlib import asynccontextmanager

from engine.config import SchedulerConfig
from router.config import AccessConfig
from router.keys import hash_of, new_key
from tests.integration.pools import Setup
from tests.integration.router_harness import MODEL, router_config
from tests.integration.test_router_pools import FAKE, served

AT_ONCE = 4  # requests that the decode worker runs
PLACES = 5
FLOOD = 60
SETUP = Setup(
    model=FAKE,
    step_s=0.02,
    scheduler=SchedulerConfig(max_num_batched_tokens=64, max_num_seqs=AT_ONCE),
    decode_blocks=256,
)


class Crowd:
    """Who asked, in the order in which they were answered."""

    def __init__(self, running, keys):
        self.running, self.keys = running, keys
        self.answered = []
        self.asking = []

    async def ask(self, name, label=None, **changes):
        body = {"model": MODEL, "prompt": [40, 41, 42], "max_tokens": 4, "ignore_eos": True, **changes}
        headers = {"Authorization": f"Bearer {self.keys[name]}"}
        response = await self.running.http.post("/v1/completions", json=body, headers=headers)
        assert response.status_code == 200, response.text
        self.answered.append(label or name)

    def send(self, *given, **changes):
        self.asking.append(asyncio.create_task(self.ask(*given, **changes)))

    async def waiting(self, number):
        async with asyncio.timeout(10):
            while await self.running.metric("diptych_requests_waiting") < number:
                await asyncio.sleep(0.01)

    async def all_are_in(self):
        """While some wait, as many run as may."""
        async with asyncio.timeout(10):
            while await self.running.metric("diptych_requests_waiting") + len(self.answered) + PLACES < len(
                self.asking
            ):
                await asyncio.sleep(0.01)


@asynccontextmanager
async def crowd(tmp_path, **owners):
    keys, path = {name: new_key() for name in owners}, tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [{"name": n, "hash": hash_of(keys[n]), **owners[n]} for n in owners]}))
    config = router_config(tmp_path, access=AccessConfig(api_keys=path))
    async with served(tmp_path, SETUP, config) as (running, workers):
        assert await running.metric("diptych_admission_places") == PLACES, "what the worker runs, and a quarter more"
        yield (made := Crowd(running, keys))
        await asyncio.gather(*made.asking)
        await workers.idle()


async def test_a_key_that_floods_delays_another_by_no_more_than_its_share(tmp_path):
    async with crowd(tmp_path, flood={}, quiet={}) as them:
        for _ in range(FLOOD):
            them.send("flood")
        await them.waiting(FLOOD // 2)
        for _ in range(3):
            before = len(them.answered)
            await them.ask("quiet")
            assert len(them.answered) - before <= 3 * PLACES, "those that ran, and about as many again"
        assert len(them.answered) < FLOOD, "else there was nothing to wait for"


async def test_only_who_may_goes_before_others_and_who_can_wait_goes_last(tmp_path):
    async with crowd(tmp_path, flood={}, granted={"best_priority": -5}) as them:
        for _ in range(FLOOD):
            them.send("flood")
        await them.all_are_in()
        await them.waiting(2 * PLACES)
        before = len(them.answered)
        them.send("flood", "takes it", priority=-5)
        them.send("flood", "can wait", priority=5)
        await them.all_are_in()
        for _ in range(2 * PLACES):
            them.send("granted", priority=-5)
        await asyncio.gather(*them.asking)
        order = them.answered[before:]
        last = max(place for place, name in enumerate(order) if name == "granted")
        assert last <= 5 * PLACES, order
        assert order.index("takes it") > len(order) - 2 * PLACES, (
            "it is the last of its owner, as if it had said nothing"
        )
        assert order.index("can wait") > len(order) - 2 * PLACES
