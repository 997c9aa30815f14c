-- KEYS record state tasks groups open sheet again
-- FENCED
-- ALWAYS
-- ARGV: then mark of this repair, sum of the sheet's counters as it was seen, reason of what is lost, what a stand-in
-- says, then five lists, each after its length: counters and their values; entries of `tasks` that are not the one of an
-- open task; tasks to close; tasks and kinds that the trainer has groups of; task, kind and body of those that are lost,
-- the body empty where the task cannot be asked again.
-- Answers 0, and does nothing, when the sheet has changed since: by a call of this trainer that was on its way, or a
-- replay of the operator.
local counters, sum = redis.call('HGETALL', sheet), 0
for i = 2, #counters, 2 do
  sum = sum + counters[i]
end
if sum ~= tonumber(ARGV[4]) then
  return 0
end
local place = 7

local function list(width)
  local first, number = place + 1, tonumber(ARGV[place])
  place = first + width * number
  return first, place - 1
end

local function leave(task)
  local _, where, id = string.match(redis.call('HGET', open, task) or '', '^(%S+) (%S+) (%S+)$')
  if where == 't' then
    redis.call('XACK', tasks, 'producers', id)
    redis.call('XDEL', tasks, id)
  elseif where == 'g' then
    redis.call('XACK', groups, 'trainer', id)
    redis.call('XDEL', groups, id)
  end
  redis.call('HDEL', open, task)
end

redis.call('HSET', state, 'repair', ARGV[3])
local first, last = list(2)
for i = first, last, 2 do
  redis.call('HSET', sheet, ARGV[i], ARGV[i + 1])
end
first, last = list(1)
for i = first, last do
  local entry = redis.call('XRANGE', tasks, ARGV[i], ARGV[i])[1]
  if entry and string.match(redis.call('HGET', open, field(entry, 'task')) or '', '%S+$') ~= ARGV[i] then
    redis.call('XACK', tasks, 'producers', ARGV[i])
    redis.call('XDEL', tasks, ARGV[i])
  end
end
first, last = list(1)
for i = first, last do
  leave(ARGV[i])
  redis.call('HDEL', again, ARGV[i])
end
first, last = list(2)
for i = first, last, 2 do
  -- Its group may have come since.
  local there = string.match(redis.call('HGET', open, ARGV[i]) or '', '^%S+ g (%S+)$')
  if not there or #redis.call('XRANGE', groups, there, there) == 0 then
    leave(ARGV[i])
    local id = redis.call('XADD', groups, '*', 'task', ARGV[i], 'attempt', '0', 'kind', ARGV[i + 1], 'producer', '',
      'lost', ARGV[6])
    redis.call('HSET', open, ARGV[i], ARGV[i + 1] .. ' g ' .. id)
  end
end
first, last = list(3)
for i = first, last, 3 do
  local task, kind, body = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  leave(task)
  redis.call('HDEL', again, task)
  count(sheet, kind, 'lost', ARGV[5])
  if body ~= '' then
    local id = redis.call('XADD', tasks, '*', 'task', task, 'attempt', '0', 'kind', kind, 'body', body)
    redis.call('HSET', open, task, kind .. ' t ' .. id)
    add(sheet, kind .. ' admitted')
  end
end
return 1
