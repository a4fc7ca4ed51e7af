"""Buckets that several routers share: one Lua script on Redis, by Redis's own clock.

    take ──▶ Redis: take or refuse, as one step ──▶ our own buckets are set to what it says
                │ no word within `patience_s`
                ▼
             LATE: our own buckets decide at once; Redis is told beside the request what they gave, and they are emptied as far as
                   Redis says that theirs are ──a word within `patience_s`──▶ as above
             AWAY: our own buckets decide, from where Redis last was

So a request never waits longer than `patience_s` for Redis, and none of the next while it is slow; the limit stays one for all
routers but for what each lets through in the time that a word takes. While Redis is away each router goes by itself, so that n
routers together let up to n times as much through: better than to refuse everybody. Both are said once in the log and counted in
a metric. Redis keeps a bucket until it is full. Does not know requests or how Redis is reached.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace

from contracts.clock import Clock
from contracts.errors import Unavailable
from contracts.upkeep import watched
from observability.log import get_logger
from registry.link import RedisLink, Script
from router.admission.limits import Buckets, LocalBuckets, Standing, Verdict, Wanted, standing

log = get_logger(__name__)
PREFIX = "diptych"  # of every name in Redis
_PATIENCE_S = 0.05  # more than Redis takes anywhere in one building, and little in a first token's time
_LATE = "it answers late"
_NONSENSE = "Redis answered what the rate limits' script does not say"

# KEYS: a bucket each. ARGV, three for each: microseconds per unit, microseconds that it holds, units wanted (as a float).
# Replies: which bucket lacks for the longest (from 1; 0 none), microseconds until it has enough, microseconds until each is full.
TAKE = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local before, after, lacking, wait = {}, {}, 0, 0
for i, key in ipairs(KEYS) do
  local unit, capacity, amount = tonumber(ARGV[3*i-2]), tonumber(ARGV[3*i-1]), tonumber(ARGV[3*i])
  before[i] = math.max(now, tonumber(redis.call('GET', key) or now))
  after[i] = before[i] + math.min(amount * unit, capacity)
  local over = after[i] - now - capacity
  if over > math.max(wait, 1) then lacking, wait = i, over end
end
local reply = {lacking, math.ceil(wait)}
for i, key in ipairs(KEYS) do
  if lacking == 0 then
    redis.call('SET', key, string.format('%.0f', after[i]), 'PX', math.ceil((after[i] - now) / 1000) + 1)
    before[i] = after[i]
  end
  reply[i + 2] = math.ceil(before[i] - now)
end
return reply
""")

# KEYS and ARGV as above; the amounts are what was taken and not used, below 0 what was used beyond it. Replies microseconds
# until each is full.
GIVE = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local reply = {}
for i, key in ipairs(KEYS) do
  local full = math.max(now, tonumber(redis.call('GET', key) or now)) - tonumber(ARGV[3*i]) * tonumber(ARGV[3*i-2])
  if full > now then
    redis.call('SET', key, string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1)
  else
    redis.call('DEL', key)
  end
  reply[i] = math.ceil(math.max(0, full - now))
end
return reply
""")


def buckets(link: RedisLink | None, clock: Clock, on_local: Callable[[], None]) -> Buckets:
    """Buckets that are shared where there is a link, else this process's own."""
    return LocalBuckets(clock) if link is None else SharedBuckets(link, clock, PREFIX, on_local)


class SharedBuckets:
    """Buckets on Redis, and this process's own for when it is away or late. `on_local` hears of every use of the latter."""

    def __init__(
        self, link: RedisLink, clock: Clock, prefix: str, on_local: Callable[[], None], patience_s: float = _PATIENCE_S
    ) -> None:
        self._link = link
        self._clock = clock
        self._prefix = prefix
        self._local = LocalBuckets(clock)
        self._on_local = on_local
        self._patience_s = patience_s
        self._problem = ""
        self._late = False
        self._telling: set[asyncio.Task[None]] = set()

    async def take(self, owner: str, wanted: Sequence[Wanted]) -> Verdict:
        """See Buckets."""
        if not self._link.up:
            return await self._take_here(owner, wanted, self._link.presence.problem)
        if self._late:
            verdict = await self._take_here(owner, wanted, _LATE)
            if verdict.granted:
                self._tell(self._charge(owner, wanted))
            return verdict
        asking = asyncio.ensure_future(self._ask(owner, wanted))
        try:
            await asyncio.wait((asking,), timeout=self._patience_s)
        except asyncio.CancelledError:
            self._tell(self._take_back(asking, owner, wanted))
            raise
        if not asking.done():
            self._late = True
            verdict = await self._take_here(owner, wanted, _LATE)
            self._tell(self._reconcile(asking, owner, wanted, here=verdict))
            return verdict
        try:
            verdict = asking.result()
        except Unavailable as error:
            return await self._take_here(owner, wanted, error.message)
        self._heard()
        self._local.level(owner, verdict.standings)
        return verdict

    async def give(self, owner: str, back: Sequence[Wanted]) -> None:
        """See Buckets."""
        await self._local.give(owner, back)
        if self._link.up:
            try:
                await self._correct(owner, back)
            except Unavailable as error:
                self._not_heard(error.message)

    async def _take_here(self, owner: str, wanted: Sequence[Wanted], problem: str) -> Verdict:
        self._not_heard(problem)
        return await self._local.take(owner, wanted)

    async def _ask(self, owner: str, wanted: Sequence[Wanted]) -> Verdict:
        return _verdict(await self._link.script(TAKE, self._keys(owner, wanted), _arguments(wanted)), wanted)

    async def _correct(self, owner: str, back: Sequence[Wanted]) -> None:
        """Give `back` in Redis; whether that is still late is known then, and what it says of the buckets counts if so."""
        began = self._clock.now()
        reply = await self._link.script(GIVE, self._keys(owner, back), _arguments(back))
        if self._late:
            self._local.level(owner, _standings(reply, back), at_least=True)
            if self._clock.now() - began < self._patience_s:
                self._heard()

    async def _charge(self, owner: str, wanted: Sequence[Wanted]) -> None:
        """Tell Redis what we gave without asking it."""
        await self._correct(owner, [replace(want, amount=-want.amount) for want in _taken(wanted)])

    async def _reconcile(
        self, asking: asyncio.Future[Verdict], owner: str, wanted: Sequence[Wanted], here: Verdict
    ) -> None:
        """Redis's own verdict comes when ours is given: what it has charged is to be what we have."""
        there = await asking
        self._local.level(owner, there.standings, at_least=True)
        if here.granted and not there.granted:
            await self._charge(owner, wanted)
        elif there.granted and not here.granted:
            await self._correct(owner, _taken(wanted))

    async def _take_back(self, asking: asyncio.Future[Verdict], owner: str, wanted: Sequence[Wanted]) -> None:
        """Nobody is there any more who could have it."""
        if (await asking).granted:
            await self._correct(owner, _taken(wanted))

    def _tell(self, work: Coroutine[None, None, None]) -> None:
        """Do this beside the request."""

        async def told() -> None:
            try:
                await work
            except Unavailable as error:
                self._not_heard(error.message)

        task = watched("telling redis of rate limits", told(), lambda: None)
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    def _keys(self, owner: str, wanted: Sequence[Wanted]) -> list[str]:
        return [f"{self._prefix}:limit:{{{owner}}}:{want.kind.value}" for want in wanted]

    def _heard(self) -> None:
        self._late = False
        if self._problem:
            self._problem = ""
            log.info("rate limits are shared again")

    def _not_heard(self, problem: str) -> None:
        self._on_local()
        if not self._problem:
            log.warning("rate limits are this router's own until Redis answers in time", reason=problem)
        self._problem = problem or "away"


def _taken(wanted: Sequence[Wanted]) -> list[Wanted]:
    """What is charged when all of it is granted."""
    return [replace(want, amount=min(want.amount, want.rate.capacity)) for want in wanted]


def _arguments(wanted: Sequence[Wanted]) -> list[str]:
    numbers: list[float] = []
    for want in wanted:
        unit = want.rate.interval_s * 1e6
        numbers += [unit, want.rate.capacity * unit, want.amount]
    return [repr(float(number)) for number in numbers]


def _verdict(reply: object, wanted: Sequence[Wanted]) -> Verdict:
    """Raises Unavailable for what the script cannot have said: whoever answers there is not our Redis."""
    match reply:
        case [int(lacking), int(wait_us), *full_us] if 0 <= lacking <= len(wanted):
            return Verdict(_standings(full_us, wanted), wanted[lacking - 1].kind if lacking else None, wait_us / 1e6)
    raise Unavailable(_NONSENSE)


def _standings(reply: object, wanted: Sequence[Wanted]) -> tuple[Standing, ...]:
    """From microseconds until each is full. Raises Unavailable, as above."""
    if not isinstance(reply, list) or len(reply) != len(wanted):
        raise Unavailable(_NONSENSE)
    found = []
    for want, full_us in zip(wanted, reply, strict=True):
        if not isinstance(full_us, int):
            raise Unavailable(_NONSENSE)
        found.append(standing(want, full_us / 1e6))
    return tuple(found)
