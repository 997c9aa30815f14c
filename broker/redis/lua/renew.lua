-- KEYS record state tasks
-- ARGV: producer, key of its heartbeat, lease in ms, how many entry ids are renewed, these, then others that it holds.
-- Answers those that are no longer its own, and 1 when entries are pending to it that it does not know of.
beat(state, ARGV[2], ARGV[3], true)
local lost, known = {}, {}
for i = 5, #ARGV do
  known[ARGV[i]] = true
  if i < 5 + tonumber(ARGV[4]) then
    if deliveries(tasks, ARGV[i], ARGV[1]) then
      redis.call('XCLAIM', tasks, 'producers', ARGV[1], 0, ARGV[i], 'JUSTID')
    else
      table.insert(lost, ARGV[i])
    end
  end
end
for _, pending in ipairs(redis.call('XPENDING', tasks, 'producers', '-', '+', #ARGV, ARGV[1])) do
  if not known[pending[1]] then
    return { lost, 1 }
  end
end
return { lost, 0 }
