-- KEYS record state tasks open sheet again
-- FENCED
-- ARGV: then the cursor or '', then task id, kind, body of each. A task that is outstanding already is not admitted again.
-- Answers those of them that the operator replayed.
local replayed = {}
for i = 4, #ARGV, 3 do
  local task, kind = ARGV[i], ARGV[i + 1]
  if redis.call('HEXISTS', open, task) == 0 then
    local id = redis.call('XADD', tasks, '*', 'task', task, 'attempt', '0', 'kind', kind, 'body', ARGV[i + 2])
    redis.call('HSET', open, task, kind .. ' t ' .. id)
    add(sheet, kind .. ' admitted')
  elseif redis.call('HEXISTS', again, task) == 1 then
    table.insert(replayed, task)
  end
end
if ARGV[3] ~= '' then
  redis.call('HSET', state, 'cursor', ARGV[3])
end
return replayed
