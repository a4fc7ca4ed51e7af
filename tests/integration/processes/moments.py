"""Moments of a request's life, reached and held: each function starts the request of a label and returns
once it stands still there.

    queued          the prefill worker has no room: the KV of others, whose commits are held, fills its pool
    mid_prefill     the first block has travelled (tcp) or room was granted (shm); the prefill worker is stopped there
    mid_transfer    tcp: a third of the bytes has travelled, the rest is held; shm: the prefill worker is stopped between blocks
    before_commit   the client has its first token, all bytes have landed, the commit is held
    after_commit    the router knows of the commit; the decode worker's first tokens are held, and it is stopped
    mid_decode      the client has eight tokens; the decode worker is stopped

In the last two the answer has `num_long` tokens, so that it is far from its end when it stands still.
Nothing depends on who is faster: what must not go on is held by a proxy or stopped by a signal. Does not know what is done
at that moment.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field

from tests.integration.processes.client import Answer, Question, question
from tests.integration.processes.cluster import Cluster
from tests.integration.processes.messages import batch_of, commit_of, is_handed_off, reserve_of
from tests.integration.processes.proxy import Direction, Passing, open_all

LIMIT_S = 20.0  # to reach a moment, and for an answer to end afterwards
NUM_PROMPT = 480
NUM_ANSWER = 48
SEEN = 8  # tokens that the client has in the middle of decoding


@dataclass
class Scene:
    """A request that stands still: who serves it, who is stopped, and who else waits."""

    cluster: Cluster
    victim: Answer
    prefill: str
    decode: str
    seen: int  # tokens that the client has
    frozen: tuple[str, ...] = ()
    others: list[Answer] = field(default_factory=list)

    def go_on(self) -> None:
        """Let everybody go on who still can."""
        for name in self.frozen:
            self.cluster.thaw(name)
        open_all(trap for trap in self.cluster.traps if trap.hold)


async def queued(cluster: Cluster, label: str, num_long: int, *, seeded: bool) -> Scene:
    """See the module."""
    held = [cluster.trap(_commits_from(f"prefill-{i}")) for i in range(2)]
    others = []
    for i in range(2):
        others.append(cluster.client.ask(question(f"{label}, before it {i}", 700, 8, seeded=seeded)))
        await cluster.route(others[-1])
    for trap in held:
        await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)
    victim, prefill, decode = await _asked(cluster, question(label, NUM_PROMPT, NUM_ANSWER, seeded=seeded))

    async def waits() -> bool:
        return (await cluster.load(prefill))[0] == 1

    await cluster.until(waits, "it waits for room")
    return Scene(cluster, victim, prefill, decode, 0, (), others)


async def mid_prefill(cluster: Cluster, label: str, num_long: int, *, seeded: bool) -> Scene:
    """See the module."""
    at = _bytes_to_decode(1) if cluster.setup.connector == "tcp" else lambda p: reserve_of(p) is not None
    trap = cluster.trap(at, lambda passing: cluster.freeze(passing.link.client), hold=False)
    victim, prefill, decode = await _asked(cluster, question(label, NUM_PROMPT, NUM_ANSWER, seeded=seeded))
    await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)
    await stopped(cluster, prefill)
    return Scene(cluster, victim, prefill, decode, 0, (prefill,))


async def mid_transfer(cluster: Cluster, label: str, num_long: int, *, seeded: bool) -> Scene:
    """See the module."""
    if cluster.setup.connector == "tcp":
        trap = cluster.trap(_bytes_to_decode(NUM_PROMPT // 16 * (32 << 10) // 3))
        victim, prefill, decode = await _asked(cluster, question(label, NUM_PROMPT, NUM_ANSWER, seeded=seeded))
        await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)
        await victim.until(lambda answer: len(answer.token_ids) == 1, LIMIT_S)
        return Scene(cluster, victim, prefill, decode, 1)
    trap = cluster.trap(lambda p: reserve_of(p) is not None, hold=False)
    victim, prefill, decode = await _asked(cluster, question(label, 960, NUM_ANSWER, seeded=seeded))
    before = (await cluster.metrics(prefill))["diptych_engine_scheduled_tokens_total"]
    await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)

    async def some_are_computed() -> bool:
        return (await cluster.metrics(prefill))["diptych_engine_scheduled_tokens_total"] >= before + 64

    await cluster.until(some_are_computed, "some blocks have travelled")
    cluster.freeze(prefill)
    await stopped(cluster, prefill)
    return Scene(cluster, victim, prefill, decode, 0, (prefill,))


async def before_commit(cluster: Cluster, label: str, num_long: int, *, seeded: bool) -> Scene:
    """See the module."""
    trap = cluster.trap(lambda passing: commit_of(passing) is not None)
    victim, prefill, decode = await _asked(cluster, question(label, NUM_PROMPT, NUM_ANSWER, seeded=seeded))
    await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)
    await victim.until(lambda answer: len(answer.token_ids) == 1, LIMIT_S)
    return Scene(cluster, victim, prefill, decode, 1)


async def after_commit(cluster: Cluster, label: str, num_long: int, *, seeded: bool) -> Scene:
    """See the module."""
    asked = question(label, NUM_PROMPT, num_long, seeded=seeded)
    cluster.trap(lambda passing: batch_of(passing) is not None)
    known = cluster.trap(is_handed_off, lambda _: cluster.freeze(cluster.routes[asked.prompt][0][1]), hold=False)
    victim, prefill, decode = await _asked(cluster, asked)
    await asyncio.wait_for(known.sprung.wait(), LIMIT_S)
    await stopped(cluster, decode)
    await victim.until(lambda answer: len(answer.token_ids) == 1, LIMIT_S)
    return Scene(cluster, victim, prefill, decode, 1, (decode,))


async def mid_decode(cluster: Cluster, label: str, num_long: int, *, seeded: bool) -> Scene:
    """See the module."""

    def at(passing: Passing) -> bool:
        batch = batch_of(passing)
        return batch is not None and any(delta.first_index >= SEEN for delta in batch.deltas)

    trap = cluster.trap(at, lambda passing: cluster.freeze(passing.link.proxy.name.partition(".")[0]))
    victim, prefill, decode = await _asked(cluster, question(label, NUM_PROMPT, num_long, seeded=seeded))
    await asyncio.wait_for(trap.sprung.wait(), LIMIT_S)
    await stopped(cluster, decode)
    await victim.until(lambda answer: len(answer.token_ids) == SEEN, LIMIT_S)
    return Scene(cluster, victim, prefill, decode, SEEN, (decode,))


MOMENTS: Mapping[str, Callable[..., Awaitable[Scene]]] = {
    moment.__name__: moment for moment in (queued, mid_prefill, mid_transfer, before_commit, after_commit, mid_decode)
}


async def _asked(cluster: Cluster, asked: Question) -> tuple[Answer, str, str]:
    victim = cluster.client.ask(asked)
    return victim, *(await cluster.route(victim))


async def stopped(cluster: Cluster, name: str) -> None:
    async def is_stopped() -> bool:
        return cluster.children[name].stopped()

    await cluster.until(is_stopped, f"{name} is stopped")


def _commits_from(prefill: str) -> Callable[[Passing], bool]:
    return lambda passing: commit_of(passing) is not None and passing.link.client == prefill


def _bytes_to_decode(num_bytes: int) -> Callable[[Passing], bool]:
    """Once so many bytes of KV, without those of this Unit, have gone to decode workers."""
    passed = 0

    def at(passing: Passing) -> bool:
        nonlocal passed
        if not passing.link.proxy.name.endswith(".kv") or passing.direction is not Direction.UP:
            return False
        before, passed = passed, passed + len(passing.unit.raw)
        return before >= num_bytes

    return at
