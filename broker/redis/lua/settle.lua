-- KEYS record state tasks groups open sheet settled again
-- FENCED
-- ALWAYS
-- ARGV: then how many settled groups stay readable, then entry id, task id, verdict, reason, held of each.
-- An empty entry id names whatever the task is now. Held is 1 for what the trainer was given and had not settled: its
-- task closes whatever entry it has now, since a Redis that lost its newest writes has an older or a second one.
-- Answers the tasks that it closed.
local counted, read, known = {}, {}, values(open, 5, 5)
for i = 4, #ARGV, 5 do
  local entry, task, verdict, reason, held = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3], ARGV[i + 4] == '1'
  local kind, where, id = string.match(known[task] or '', '^(%S+) (%S+) (%S+)$')
  local any = entry == ''
  if any and where == 'g' then
    entry = id
  end
  local acked = entry ~= '' and redis.call('XACK', groups, 'trainer', entry) == 1
  if acked and not redis.call('LPOS', settled, entry) then
    read[#read + 1] = entry
  end
  local named = where == 'g' and id == entry
  if kind and (any or named or (held and verdict ~= 'superseded')) then
    if where == 't' then
      redis.call('XACK', tasks, 'producers', id)
      redis.call('XDEL', tasks, id)
    elseif not (named and acked) then
      -- Nobody has read it, or it is a second one: nobody shall.
      redis.call('XACK', groups, 'trainer', id)
      redis.call('XDEL', groups, id)
    end
    known[task] = nil
    count(sheet, kind, verdict, reason)
    counted[#counted + 1] = task
  end
end
all(counted, 'HDEL', open)
all(counted, 'HDEL', again)
local most = (all(read, 'RPUSH', settled) or redis.call('LLEN', settled)) - ARGV[3]
if most > 0 then
  all(redis.call('LPOP', settled, most), 'XDEL', groups)
end
return counted
