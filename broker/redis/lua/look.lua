-- KEYS record state tasks groups open sheet again
-- FENCED
-- Answers the sheet, the number of the newest replay, the mark of the newest repair, the entries of `tasks` that name a
-- task and are not the one of an open task, then of each open task: its id, kind, 't' or 'g', 1 when that entry is there,
-- and the number of its replay or 0.
local all, named, waiting, strays = redis.call('HGETALL', open), {}, 0, {}
local answer = { redis.call('HGETALL', sheet), tonumber(redis.call('HGET', state, 'replays') or 0),
  redis.call('HGET', state, 'repair') or '', strays }
for i = 1, #all, 2 do
  local kind, where, id = string.match(all[i + 1], '^(%S+) (%S+) (%S+)$')
  local there = where and #redis.call('XRANGE', where == 't' and tasks or groups, id, id) == 1
  if there and where == 't' then
    named[id], waiting = true, waiting + 1
  end
  table.insert(answer, { all[i], kind or '', where or '', there and 1 or 0,
    tonumber(redis.call('HGET', again, all[i]) or 0) })
end
local after = '-'
while redis.call('XLEN', tasks) > waiting + #strays do
  local page = redis.call('XRANGE', tasks, after, '+', 'COUNT', 256)
  if #page == 0 then
    break
  end
  for _, entry in ipairs(page) do
    if field(entry, 'task') and not named[entry[1]] then
      table.insert(strays, entry[1])
    end
  end
  after = '(' .. page[#page][1]
end
return answer
