-- KEYS record tasks groups open dead
-- ALWAYS
-- ARGV: producer, entry id, reason, SHA-256 of the body, its length, most bytes kept, most dead entries
-- The task goes to `dead`; a group without body takes its place, so that the trainer wakes, counts it and frees its slot.
local delivered = deliveries(tasks, ARGV[2], ARGV[1])
local entry = delivered and redis.call('XRANGE', tasks, ARGV[2], ARGV[2])[1]
if not entry then
  return 0
end
local task, kind = field(entry, 'task') or '', field(entry, 'kind') or ''
local attempt = (tonumber(field(entry, 'attempt')) or 0) + delivered
redis.call('XACK', tasks, 'producers', ARGV[2])
redis.call('XDEL', tasks, ARGV[2])
redis.call('XADD', dead, 'MAXLEN', ARGV[7], '*', 'task', task, 'attempt', attempt, 'kind', kind, 'producer', ARGV[1], 'source', 'tasks',
  'reason', ARGV[3], 'sha256', ARGV[4], 'length', ARGV[5], 'body', string.sub(field(entry, 'body') or '', 1, ARGV[6]))
if redis.call('HGET', open, task) ~= kind .. ' t ' .. ARGV[2] then
  return 1
end
local id = redis.call('XADD', groups, '*', 'task', task, 'attempt', attempt, 'kind', kind, 'producer', ARGV[1],
  'dead', ARGV[3])
redis.call('HSET', open, task, kind .. ' g ' .. id)
return 1
