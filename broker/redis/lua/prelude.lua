-- Stands before every script. KEYS[1] is the run's record; without it nothing may be written.
-- A run that has ended carries a time to live; what a late script creates takes it over (see epilogue.lua).
local left = redis.call('PTTL', KEYS[1])
if left == -2 then
  return redis.error_reply('GONE')
end

local function field(entry, name)
  local fields = entry[2]
  for i = 1, #fields, 2 do
    if fields[i] == name then
      return fields[i + 1]
    end
  end
  return nil
end

-- What a hash has under the names that stand at every so many arguments, by name.
local function values(hash, first, step)
  local names, found = {}, {}
  for i = first, #ARGV, step do
    names[#names + 1] = ARGV[i]
  end
  local there = #names > 0 and redis.call('HMGET', hash, unpack(names)) or {}
  for i, name in ipairs(names) do
    found[name] = there[i]
  end
  return found
end

-- One command for a whole list; none where the list is empty.
local function all(list, ...)
  local command = { ... }
  for _, part in ipairs(list) do
    command[#command + 1] = part
  end
  return #list > 0 and redis.call(unpack(command))
end

-- Milliseconds since the epoch on this server's clock.
local function now_ms()
  local now = redis.call('TIME')
  return now[1] * 1000 + math.floor(now[2] / 1000)
end

-- What `add` has counted up to in this script, and how many of these counters are new; epilogue.lua writes them.
local counters, new, sums = nil, 0, {}

-- Adds 1. As a value, not as an increment: a transaction that an append-only file has torn, of which Redis makes the
-- beginning at a later start, then changes no number.
local function add(hash, name)
  if not sums[name] then
    local known = redis.call('HGET', hash, name)
    counters, new, sums[name] = hash, new + (known and 0 or 1), tonumber(known) or 0
  end
  sums[name] = sums[name] + 1
end

-- Counts one task under its verdict. Reasons are free text: beyond 512 fields they count together.
local function count(sheet, kind, verdict, reason)
  add(sheet, kind .. ' v ' .. verdict)
  if reason ~= '' then
    local name = kind .. ' r ' .. verdict .. ': ' .. reason
    if not sums[name] and redis.call('HEXISTS', sheet, name) == 0 and redis.call('HLEN', sheet) + new >= 512 then
      name = kind .. ' r ' .. verdict .. ': other reasons'
    end
    add(sheet, name)
  end
end

-- The delivery of a task entry to a consumer: how often it was delivered, or nil when it is another's or nobody's.
local function deliveries(tasks, entry, consumer)
  local pending = redis.call('XPENDING', tasks, 'producers', entry, entry, 1)
  if #pending == 1 and pending[1][2] == consumer then
    return pending[1][4]
  end
  return nil
end

-- Notes that Redis answers. Where nobody was heard for 6/10 of a lease of the producers, it was Redis that was away, and
-- for one lease more nobody is taken for dead. (Each is heard four times a lease; so one whose lease ran out because Redis
-- stood still was last heard, with all others, 3/4 of it ago.) The lease is the given one where none is known.
local function heard(state, lease, of_producer)
  local now, said = now_ms(), redis.call('HMGET', state, 'heard', 'lease')
  local theirs = tonumber(of_producer and lease or said[2] or lease)
  local silent = now - tonumber(said[1] or now)
  if silent > theirs * 0.6 then
    redis.call('HSET', state, 'mercy', now + theirs)
  end
  if silent > theirs / 8 or not said[1] then
    redis.call('HSET', state, 'heard', now, 'lease', theirs)
  end
end

-- A service says that it lives: its heartbeat's key stays for one lease.
local function beat(state, key, lease, of_producer)
  if redis.call('PEXPIRE', key, lease) == 0 then
    redis.call('SET', key, '1', 'PX', lease)
  end
  heard(state, lease, of_producer)
end
