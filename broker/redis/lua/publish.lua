-- KEYS record tasks groups open published
-- ARGV: producer, how many published attempts are remembered, then entry id of the task, task id, attempt, kind, body of
-- each group. Answers "published", "repeated" or "superseded" for each.
-- The groups first, then the acknowledgement of their tasks. At maxmemory the first write is refused, and nothing happens.
local me, now, waiting = ARGV[1], now_ms(), values(open, 4, 5)
local answers, ended, left_by, linked, said = {}, {}, {}, {}, {}

local function publish(entry, task, attempt, kind, body)
  local name = task .. ' ' .. attempt
  local delivered = not left_by[entry] and deliveries(tasks, entry, me)
  local there = delivered and redis.call('XRANGE', tasks, entry, entry)[1]
  local mine = there and field(there, 'task') == task and (tonumber(field(there, 'attempt')) or 0) + delivered == tonumber(attempt)
  if not mine then
    return (left_by[entry] == name or redis.call('ZSCORE', published, name)) and 'repeated' or 'superseded'
  end
  left_by[entry], ended[#ended + 1] = '', entry
  if waiting[task] ~= kind .. ' t ' .. entry then
    -- An entry that admission did not make, or a second one of a task: it leaves with this attempt.
    return 'superseded'
  end
  local id = redis.call('XADD', groups, '*', 'task', task, 'attempt', attempt, 'kind', kind, 'producer', me, 'body', body)
  left_by[entry] = name
  linked[#linked + 1], linked[#linked + 2] = task, kind .. ' g ' .. id
  said[#said + 1], said[#said + 2] = now, name
  return 'published'
end

for i = 3, #ARGV, 5 do
  answers[#answers + 1] = publish(ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4])
end
all(ended, 'XACK', tasks, 'producers')
all(ended, 'XDEL', tasks)
all(linked, 'HSET', open)
all(said, 'ZADD', published)
redis.call('ZREMRANGEBYRANK', published, 0, -tonumber(ARGV[2]) - 1)
return answers
