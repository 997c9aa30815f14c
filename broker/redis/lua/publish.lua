-- KEYS record tasks groups open published
-- ARGV: producer, how many published attempts are remembered, then entry id of the task, task id, attempt, kind, body of
-- each group. Answers "published", "repeated" or "superseded" for each.
-- The group first, then the acknowledgement of its task. At maxmemory the first write is refused, and nothing happens;
-- only behind one that is superseded the groups of the same call slip past it.
local me, now = ARGV[1], now_ms()

local function publish(entry, task, attempt, kind, body)
  local delivered = deliveries(tasks, entry, me)
  local there = delivered and redis.call('XRANGE', tasks, entry, entry)[1]
  local mine = there and field(there, 'task') == task and (tonumber(field(there, 'attempt')) or 0) + delivered == tonumber(attempt)
  if not mine then
    return redis.call('ZSCORE', published, task .. ' ' .. attempt) and 'repeated' or 'superseded'
  end
  local waits = redis.call('HGET', open, task) == kind .. ' t ' .. entry
  local id = waits and redis.call('XADD', groups, '*',
    'task', task, 'attempt', attempt, 'kind', kind, 'producer', me, 'body', body)
  redis.call('XACK', tasks, 'producers', entry)
  redis.call('XDEL', tasks, entry)
  if not waits then
    -- An entry that admission did not make, or a second one of a task: it has left with this attempt.
    return 'superseded'
  end
  redis.call('HSET', open, task, kind .. ' g ' .. id)
  redis.call('ZADD', published, now, task .. ' ' .. attempt)
  return 'published'
end

local answers = {}
for i = 3, #ARGV, 5 do
  table.insert(answers, publish(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4]))
end
redis.call('ZREMRANGEBYRANK', published, 0, -tonumber(ARGV[2]) - 1)
return answers
