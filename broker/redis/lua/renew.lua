-- KEYS record tasks
-- ARGV: producer, key of its heartbeat, lease in ms, then entry ids. Answers those that are no longer its own.
redis.call('PEXPIRE', ARGV[2], ARGV[3])
local lost = {}
for i = 4, #ARGV do
  if deliveries(tasks, ARGV[i], ARGV[1]) then
    redis.call('XCLAIM', tasks, 'producers', ARGV[1], 0, ARGV[i], 'JUSTID')
  else
    table.insert(lost, ARGV[i])
  end
end
return lost
