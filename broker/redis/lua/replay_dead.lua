-- KEYS record state tasks groups open sheet dead again
-- ARGV: id of the dead entry. It goes back where it came from, and its task is admitted anew.
-- Answers what it did: 'replayed', or why not.
local entry = redis.call('XRANGE', dead, ARGV[1], ARGV[1])[1]
if not entry then
  return 'unknown'
end
local task, kind, body = field(entry, 'task') or '', field(entry, 'kind') or '', field(entry, 'body') or ''
if task == '' or (kind ~= 'train' and kind ~= 'eval') then
  return 'foreign'
end
if tonumber(field(entry, 'length')) ~= #body then
  return 'cut'
end
if redis.call('HEXISTS', open, task) == 1 then
  return 'outstanding'
end
local attempt = field(entry, 'attempt') or ''
local where, id
if field(entry, 'source') == 'tasks' then
  where, id = 't', redis.call('XADD', tasks, '*', 'task', task, 'attempt', attempt, 'kind', kind, 'body', body)
else
  where, id = 'g', redis.call('XADD', groups, '*', 'task', task, 'attempt', attempt, 'kind', kind,
    'producer', field(entry, 'producer') or '', 'body', body)
end
redis.call('HSET', open, task, kind .. ' ' .. where .. ' ' .. id)
redis.call('HINCRBY', sheet, kind .. ' admitted', 1)
-- The trainer compares the number with the last one it has seen.
redis.call('HSET', again, task, redis.call('HINCRBY', state, 'replays', 1))
redis.call('XDEL', dead, ARGV[1])
return 'replayed'
