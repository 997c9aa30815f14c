-- KEYS record tasks open
-- ARGV: producer, then entry ids
-- A task that is given back becomes a new entry, so that whoever waits is woken; its attempts count on,
-- its deliveries (which make it poison) start anew.
local returned = 0
for i = 2, #ARGV do
  local delivered = deliveries(tasks, ARGV[i], ARGV[1])
  local entry = delivered and redis.call('XRANGE', tasks, ARGV[i], ARGV[i])[1]
  local task, kind = entry and field(entry, 'task'), entry and field(entry, 'kind')
  if task and redis.call('HGET', open, task) == kind .. ' t ' .. ARGV[i] then
    redis.call('XACK', tasks, 'producers', ARGV[i])
    redis.call('XDEL', tasks, ARGV[i])
    local id = redis.call('XADD', tasks, '*', 'task', task, 'attempt', (tonumber(field(entry, 'attempt')) or 0) + delivered,
      'kind', kind, 'body', field(entry, 'body'))
    redis.call('HSET', open, task, kind .. ' t ' .. id)
    returned = returned + 1
  end
end
return returned
