-- KEYS record tasks
-- ARGV: the most entries. Answers id, task, kind, holder and deliveries of each, the oldest first.
local answer = {}
for _, entry in ipairs(redis.call('XRANGE', tasks, '-', '+', 'COUNT', ARGV[1])) do
  local fields = {}
  for i = 1, #entry[2], 2 do
    fields[entry[2][i]] = entry[2][i + 1]
  end
  local pending = redis.call('XPENDING', tasks, 'producers', entry[1], entry[1], 1)[1]
  table.insert(answer, { entry[1], fields.task or '', fields.kind or '', pending and pending[2] or '', pending and pending[4] or 0 })
end
return answer
