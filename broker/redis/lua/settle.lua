-- KEYS record state tasks groups open sheet settled
-- FENCED
-- ALWAYS
-- ARGV: then how many settled groups stay readable, then entry id, task id, verdict, reason of each
-- A task is counted when its open entry is the one named; an empty entry id names whatever the task is now.
local counted = 0
for i = 4, #ARGV, 4 do
  local entry, task, verdict, reason = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3]
  local known = redis.call('HGET', open, task)
  local kind, where, id
  if known then
    kind, where, id = string.match(known, '^(%S+) (%S+) (%S+)$')
  end
  if known and entry == '' and where == 't' then
    redis.call('XACK', tasks, 'producers', id)
    redis.call('XDEL', tasks, id)
  elseif known and entry == '' then
    entry = id
  end
  local counts = known and (entry == '' or (where == 'g' and entry == id))
  if entry ~= '' and redis.call('XACK', groups, 'trainer', entry) == 1 then
    redis.call('RPUSH', settled, entry)
  elseif entry ~= '' and counts then
    -- Nobody has read it, and nobody shall.
    redis.call('XDEL', groups, entry)
  end
  if counts then
    redis.call('HDEL', open, task)
    count(sheet, kind, verdict, reason)
    counted = counted + 1
  end
end
while redis.call('LLEN', settled) > tonumber(ARGV[3]) do
  redis.call('XDEL', groups, redis.call('LPOP', settled))
end
return counted
