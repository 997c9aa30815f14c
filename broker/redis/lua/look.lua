-- KEYS record state tasks groups open sheet settled again
-- FENCED
-- Answers the sheet, the number of the newest replay, the mark of the newest repair, then of each open task: its id,
-- kind, 't' or 'g', 1 when that entry is there, and the number of its replay or 0.
local all = redis.call('HGETALL', open)
local answer = { redis.call('HGETALL', sheet), tonumber(redis.call('HGET', state, 'replays') or 0),
  redis.call('HGET', state, 'repair') or '' }
-- As in balance.lua: where the lengths agree, each has its entry.
local whole = redis.call('XLEN', tasks) + redis.call('XLEN', groups) - redis.call('LLEN', settled) == #all / 2
for i = 1, #all, 2 do
  local kind, where, id = string.match(all[i + 1], '^(%S+) (%S+) (%S+)$')
  local there = whole or (where and #redis.call('XRANGE', where == 't' and tasks or groups, id, id) == 1)
  table.insert(answer, { all[i], kind or '', where or '', there and 1 or 0,
    tonumber(redis.call('HGET', again, all[i]) or 0) })
end
return answer
