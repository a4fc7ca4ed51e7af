"""Buckets that several routers share: one Lua script on Redis, by Redis's own clock.

    take ──▶ Redis: take or refuse, as one step        Redis away or slow ──▶ this router's own buckets, whole ones

While Redis is away each router goes by itself, so that n routers together let up to n times as much through: better than to
refuse everybody, and said once in the log and in a metric. Redis keeps a bucket until it is full. What was taken from one side
is given back to that side's buckets, wherever they are by then. Does not know requests or how Redis is reached.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from contracts.clock import Clock
from contracts.errors import Unavailable
from observability.log import get_logger
from registry.link import RedisLink, Script
from router.admission.limits import Buckets, LocalBuckets, Verdict, Wanted, standing

log = get_logger(__name__)
PREFIX = "diptych"  # of every name in Redis

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

# KEYS and ARGV as above; the amounts are what was taken and not used, below 0 what was used beyond it.
GIVE = Script("""
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
for i, key in ipairs(KEYS) do
  local full = math.max(now, tonumber(redis.call('GET', key) or now)) - tonumber(ARGV[3*i]) * tonumber(ARGV[3*i-2])
  if full > now then
    redis.call('SET', key, string.format('%.0f', full), 'PX', math.ceil((full - now) / 1000) + 1)
  else
    redis.call('DEL', key)
  end
end
return 0
""")


def buckets(link: RedisLink | None, clock: Clock, on_local: Callable[[], None]) -> Buckets:
    """Buckets that are shared where there is a link, else this process's own."""
    return LocalBuckets(clock) if link is None else SharedBuckets(link, clock, PREFIX, on_local)


class SharedBuckets:
    """Buckets on Redis, and this process's own for when it is away. `on_local` hears of every use of the latter."""

    def __init__(self, link: RedisLink, clock: Clock, prefix: str, on_local: Callable[[], None]) -> None:
        self._link = link
        self._prefix = prefix
        self._local = LocalBuckets(clock)
        self._on_local = on_local
        self._away = False

    async def take(self, owner: str, wanted: Sequence[Wanted]) -> Verdict:
        """See Buckets."""
        try:
            reply = await self._link.script(TAKE, self._keys(owner, wanted), _arguments(wanted))
            self._heard()
            return _verdict(reply, wanted)
        except Unavailable as error:
            self._not_heard(error)
            return await self._local.take(owner, wanted)

    async def give(self, owner: str, back: Sequence[Wanted]) -> None:
        """See Buckets."""
        try:
            await self._link.script(GIVE, self._keys(owner, back), _arguments(back))
            self._heard()
        except Unavailable as error:
            self._not_heard(error)
            await self._local.give(owner, back)

    def _keys(self, owner: str, wanted: Sequence[Wanted]) -> list[str]:
        return [f"{self._prefix}:limit:{{{owner}}}:{want.kind.value}" for want in wanted]

    def _heard(self) -> None:
        if self._away:
            self._away = False
            log.info("rate limits are shared again")

    def _not_heard(self, error: Unavailable) -> None:
        self._on_local()
        if not self._away:
            self._away = True
            log.warning("rate limits are this router's own until Redis answers", reason=error)


def _arguments(wanted: Sequence[Wanted]) -> list[str]:
    numbers: list[float] = []
    for want in wanted:
        unit = want.rate.interval_s * 1e6
        numbers += [unit, want.rate.capacity * unit, want.amount]
    return [repr(float(number)) for number in numbers]


def _verdict(reply: object, wanted: Sequence[Wanted]) -> Verdict:
    """Raises Unavailable for what the script cannot have said: whoever answers there is not our Redis."""
    match reply:
        case [int(lacking), int(wait_us), *full_us] if len(full_us) == len(wanted) and 0 <= lacking <= len(wanted):
            standings = tuple(
                standing(want, full / 1e6) for want, full in zip(wanted, full_us, strict=True) if isinstance(full, int)
            )
            return Verdict(standings, wanted[lacking - 1].kind if lacking else None, wait_us / 1e6)
    raise Unavailable("Redis answered what the rate limits' script does not say")
