-- KEYS record tasks groups open published
-- ARGV: producer, entry id of the task, task id, attempt, kind, body, how many published attempts are remembered
-- The group first, then the acknowledgement of its task. At maxmemory the first write is refused, and nothing happens.
local me, entry, task, attempt, kind = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local delivered = deliveries(tasks, entry, me)
local there = delivered and redis.call('XRANGE', tasks, entry, entry)[1]
local mine = there and field(there, 'task') == task and (field(there, 'attempt') or 0) + delivered == tonumber(attempt)
if not mine then
  if redis.call('ZSCORE', published, task .. ' ' .. attempt) then
    return 'repeated'
  end
  return 'superseded'
end
if redis.call('HGET', open, task) ~= kind .. ' t ' .. entry then
  -- An entry that admission did not make, or a second one of a task: it leaves with this attempt.
  redis.call('XACK', tasks, 'producers', entry)
  redis.call('XDEL', tasks, entry)
  return 'superseded'
end
local id = redis.call('XADD', groups, '*',
  'task', task, 'attempt', attempt, 'kind', kind, 'producer', me, 'body', ARGV[6])
redis.call('XACK', tasks, 'producers', entry)
redis.call('XDEL', tasks, entry)
redis.call('HSET', open, task, kind .. ' g ' .. id)
redis.call('ZADD', published, now_ms(), task .. ' ' .. attempt)
redis.call('ZREMRANGEBYRANK', published, 0, -tonumber(ARGV[7]) - 1)
return 'published'
