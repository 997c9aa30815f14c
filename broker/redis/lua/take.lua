-- KEYS record state tasks
-- ARGV: producer, prefix of heartbeats, lease in ms, most tasks, 1 when a reply was lost, then ids that it holds
-- First tasks of consumers whose heartbeat is gone (and of its own what a lost reply carried), then new ones.
-- Answers the time and {id, deliveries, fields} of each.
local me, beats, most = ARGV[1], ARGV[2], tonumber(ARGV[4])
beat(state, beats .. me, ARGV[3], true)
local now, seen = now_ms(), redis.call('HMGET', state, 'mercy', 'looked')
local merciful = now < tonumber(seen[1] or 0)
-- To look takes the longer the more producers there are, so it is done once for all of them in an eighth of a lease.
local since = now - tonumber(seen[2] or 0)
local looks = ARGV[5] == '1' or not merciful and (since < 0 or since > ARGV[3] / 8)
local held, taken = {}, {}
for i = 6, #ARGV do
  held[ARGV[i]] = true
end

local function claim(consumer, scan)
  for _, pending in ipairs(redis.call('XPENDING', tasks, 'producers', '-', '+', scan, consumer)) do
    if #taken >= most then
      return
    end
    if not held[pending[1]] then
      local got = redis.call('XCLAIM', tasks, 'producers', me, 0, pending[1])
      if got[1] then
        table.insert(taken, { pending[1], pending[4] + 1, got[1][2] })
      else
        redis.call('XACK', tasks, 'producers', pending[1])
      end
    end
  end
end

for _, info in ipairs(looks and redis.call('XINFO', 'CONSUMERS', tasks, 'producers') or {}) do
  local name, pending = info[2], info[4]
  if name == me then
    if ARGV[5] == '1' then
      claim(me, most + #ARGV)
    end
  elseif not merciful and redis.call('EXISTS', beats .. name) == 0 then
    if pending > 0 then
      claim(name, most)
    else
      redis.call('XGROUP', 'DELCONSUMER', tasks, 'producers', name)
    end
  end
  if #taken >= most then
    break
  end
end

if looks and not merciful and #taken < most then
  redis.call('HSET', state, 'looked', now)
end
if #taken < most then
  local read = redis.call('XREADGROUP', 'GROUP', 'producers', me, 'COUNT', most - #taken, 'STREAMS', tasks, '>')
  if read and read[1] then
    for _, entry in ipairs(read[1][2]) do
      table.insert(taken, { entry[1], 1, entry[2] })
    end
  end
end
return { now, taken }
