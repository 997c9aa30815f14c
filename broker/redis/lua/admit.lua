-- KEYS record state tasks open sheet again
-- FENCED
-- ARGV: then the cursor or '', then task id, kind, body of each. A task that is outstanding already is not admitted again.
-- Answers those of them that the operator replayed.
local replayed, opened, known = {}, {}, values(open, 4, 3)
for i = 4, #ARGV, 3 do
  local task, kind = ARGV[i], ARGV[i + 1]
  if not known[task] then
    local id = redis.call('XADD', tasks, '*', 'task', task, 'attempt', '0', 'kind', kind, 'body', ARGV[i + 2])
    known[task] = kind .. ' t ' .. id
    opened[#opened + 1], opened[#opened + 2] = task, known[task]
    add(sheet, kind .. ' admitted')
  elseif redis.call('HEXISTS', again, task) == 1 then
    replayed[#replayed + 1] = task
  end
end
all(opened, 'HSET', open)
if ARGV[3] ~= '' then
  redis.call('HSET', state, 'cursor', ARGV[3])
end
return replayed
