-- KEYS record state groups open settled
-- ARGV: 1 when the size of what is left to read is asked for, then entry id and task id of each.
-- Answers the number of the newest replay, how many entries are left, and the bytes of all that are there; then of each
-- entry '' when it is the one that its task waits for, 'settled', or why nobody waits for it.
local answer = { tonumber(redis.call('HGET', state, 'replays') or 0), 0, 0 }
if ARGV[1] == '1' then
  answer[2] = redis.call('XLEN', groups) - redis.call('LLEN', settled) - redis.call('XPENDING', groups, 'trainer')[1]
  local size = redis.pcall('MEMORY', 'USAGE', groups, 'SAMPLES', '0')
  answer[3] = tonumber(size) or 0
end

local function same_body(one, other)
  local a, b = redis.call('XRANGE', groups, one, one)[1], redis.call('XRANGE', groups, other, other)[1]
  return a and b and field(a, 'body') == field(b, 'body')
end

local waiting = values(open, 3, 2)
for i = 2, #ARGV, 2 do
  local entry, known = ARGV[i], waiting[ARGV[i + 1]]
  local where, id = string.match(known or '', '^%S+ (%S+) (%S+)$')
  local says = ''
  if where == 'g' and id == entry then
    says = ''
  elseif redis.call('LPOS', settled, entry) then
    -- Its acknowledgement got lost with the consumer group.
    redis.call('XACK', groups, 'trainer', entry)
    says = 'settled'
  elseif not known then
    says = 'no task waits for it'
  elseif where == 't' then
    says = 'its task is not finished by the entry that waits for it'
  elseif same_body(entry, id) then
    says = 'its task has the same group already'
  else
    says = 'its task has a group with other content already'
  end
  table.insert(answer, says)
end
return answer
