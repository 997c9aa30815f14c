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
add(sheet, kind .. ' admitted')
-- The trainer compares the number with the newest one it has seen. A Redis that forgot some gives none of them twice.
local number = math.max(now_ms(), (tonumber(redis.call('HGET', state, 'replays')) or 0) + 1)
redis.call('HSET', state, 'replays', number)
redis.call('HSET', again, task, number)
redis.call('XDEL', dead, ARGV[1])
return 'replayed'
