"""What happens in Redis in one step: a word is judged, kept and told to all, or refused; so that no two workers get one name.

Redis runs one script at a time, so its order is the order for everybody, and its clock is the only one: epochs come from a
counter that starts at its milliseconds (a Redis that forgot everything still gives greater ones), leases expire by it. A name
that somebody filled with something of another type is taken back. Does not know what the values mean.
"""

from __future__ import annotations

from typing import Final

from registry.link import Script

_OWN: Final = """
local function own(key, kind)
  local is = redis.call('TYPE', key).ok
  if is ~= kind and is ~= 'none' then redis.call('DEL', key) end
end
local function now_ms()
  local t = redis.call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000)
end
local DAY, MONTH = 86400000, 2592000000
"""

# KEYS epoch counter. Returns a life that was never begun before.
BEGIN: Final = Script(
    _OWN
    + """
own(KEYS[1], 'string')
local now = now_ms()
local epoch = redis.pcall('INCR', KEYS[1])
if type(epoch) ~= 'number' or epoch < 1000000000000 or epoch > now + DAY then
  epoch = now
  redis.call('SET', KEYS[1], string.format('%.0f', epoch))
end
redis.call('PEXPIRE', KEYS[1], MONTH)
return epoch
"""
)

# KEYS lease, epoch counter, suspicion, ids, layout. ARGV id, epoch, address, kind, state, layout, ttl ms, word, lease prefix,
# channel. Returns {'ok'}, {'stale', epoch expected}, {'taken', address of its holder} or {'unlike', layout of the others}.
ANNOUNCE: Final = Script(
    _OWN
    + """
local id, epoch, address, layout, ttl = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[6], ARGV[7]
own(KEYS[1], 'hash') own(KEYS[2], 'string') own(KEYS[3], 'string') own(KEYS[4], 'set') own(KEYS[5], 'string')
local known = redis.call('HMGET', KEYS[1], 'epoch', 'address', 'left')
local before = tonumber(known[1])
if before and not (before >= 0 and before <= 9007199254740991) then before = nil end
if before and known[3] then
  if epoch <= before then return {'stale', string.format('%.0f', before + 1)} end
elseif before then
  if known[2] ~= address and redis.call('GET', KEYS[3]) ~= known[1] then return {'taken', known[2] or ''} end
  if epoch < before then return {'stale', string.format('%.0f', before)} end
end
local common = redis.call('GET', KEYS[5])
if common and common ~= layout then
  for _, other in ipairs(redis.call('SMEMBERS', KEYS[4])) do
    if other ~= id and redis.call('TYPE', ARGV[9] .. other).ok == 'hash' then
      local lives = redis.call('HMGET', ARGV[9] .. other, 'epoch', 'left')
      if lives[1] and not lives[2] then return {'unlike', common} end
    end
  end
end
redis.call('DEL', KEYS[1], KEYS[3])
redis.call('HSET', KEYS[1], 'epoch', ARGV[2], 'address', address, 'kind', ARGV[4], 'state', ARGV[5], 'ttl', ttl, 'word', ARGV[8])
redis.call('PEXPIRE', KEYS[1], ttl)
redis.call('SADD', KEYS[4], id)
redis.call('SET', KEYS[5], layout, 'PX', ttl)
if epoch <= now_ms() + DAY and epoch > (tonumber(redis.call('GET', KEYS[2])) or 0) then
  redis.call('SET', KEYS[2], ARGV[2], 'PX', MONTH)
end
redis.call('PUBLISH', ARGV[10], ARGV[8])
return {'ok'}
"""
)

# KEYS lease, ids. ARGV id, epoch, tombstone ms, word, lease prefix, channel, kind if known. Returns how many others of its pool
# take work.
LEAVE: Final = Script(
    _OWN
    + """
own(KEYS[1], 'hash') own(KEYS[2], 'set')
local known = redis.call('HMGET', KEYS[1], 'epoch', 'left', 'kind')
local kind = known[3] or ARGV[7]
if known[1] == ARGV[2] and not known[2] then
  redis.call('HDEL', KEYS[1], 'word')
  redis.call('HSET', KEYS[1], 'left', '1')
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  redis.call('PUBLISH', ARGV[6], ARGV[4])
end
local others = 0
for _, other in ipairs(redis.call('SMEMBERS', KEYS[2])) do
  if other ~= ARGV[1] and redis.call('TYPE', ARGV[5] .. other).ok == 'hash' then
    local is = redis.call('HMGET', ARGV[5] .. other, 'kind', 'state', 'left')
    if is[1] == kind and is[2] == 'ready' and not is[3] then others = others + 1 end
  end
end
return others
"""
)

# KEYS ids, router's lease. ARGV lease prefix, router's ttl ms. Returns {id, epoch, word or '', ms until it expires, its ttl ms}
# for each: an empty word says that it left. Writes, so that a Redis which takes no writes is found out.
LOOK: Final = Script(
    _OWN
    + """
own(KEYS[1], 'set') own(KEYS[2], 'string')
redis.call('SET', KEYS[2], '1', 'PX', ARGV[2])
local found = {}
for _, id in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local key = ARGV[1] .. id
  own(key, 'hash')
  local is = redis.call('HMGET', key, 'epoch', 'word', 'ttl', 'left')
  if not is[1] then
    redis.call('SREM', KEYS[1], id)
  else
    local word = is[4] and '' or is[2] or ''
    found[#found + 1] = {id, is[1], word, redis.call('PTTL', key), is[3] or ''}
  end
end
return found
"""
)

# KEYS suspicion, lease. ARGV epoch, ttl ms. Marks that life, if it is the one that lives.
SUSPECT: Final = Script(
    _OWN
    + """
own(KEYS[1], 'string') own(KEYS[2], 'hash')
if redis.call('HGET', KEYS[2], 'epoch') == ARGV[1] then redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2]) end
return 1
"""
)
