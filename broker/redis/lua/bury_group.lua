-- KEYS record state groups open sheet dead again
-- FENCED
-- ALWAYS
-- ARGV: then entry id, verdict, reason, SHA-256 of the body, its length, most bytes kept, most dead entries
-- Answers 1 when this was the open group of a task, which is then counted under the verdict. Where the broker itself says
-- what became of the task, there is no letter.
local id = ARGV[3]
local entry = redis.call('XRANGE', groups, id, id)[1]
redis.call('XACK', groups, 'trainer', id)
if not entry then
  return 0
end
local task = field(entry, 'task') or ''
if not field(entry, 'dead') and not field(entry, 'lost') then
  redis.call('XADD', dead, 'MAXLEN', ARGV[9], '*', 'task', task, 'attempt', field(entry, 'attempt') or '',
    'kind', field(entry, 'kind') or '', 'producer', field(entry, 'producer') or '', 'source', 'groups', 'reason', ARGV[5], 'sha256', ARGV[6], 'length', ARGV[7],
    'body', string.sub(field(entry, 'body') or '', 1, ARGV[8]))
end
redis.call('XDEL', groups, id)
local known = redis.call('HGET', open, task)
local kind = known and string.match(known, '^(%S+) g ' .. string.gsub(id, '%-', '%%-') .. '$')
if not kind then
  return 0
end
redis.call('HDEL', open, task)
redis.call('HDEL', again, task)
count(sheet, kind, ARGV[4], ARGV[5])
return 1
