-- KEYS record state tasks peers
-- ALWAYS
-- ARGV: producer, key of its heartbeat, lease in ms
-- A process that joins under a name holds nothing: what an earlier process of that name held is anybody's, at once.
beat(state, ARGV[2], ARGV[3], true)
redis.call('HDEL', state, 'looked')
-- Nor has it said anything of itself: what that one said would pass for it until its first heartbeat.
redis.call('HDEL', peers, ARGV[1])
local moved = 0
while true do
  local pending = redis.call('XPENDING', tasks, 'producers', '-', '+', 256, ARGV[1])
  for _, entry in ipairs(pending) do
    redis.call('XCLAIM', tasks, 'producers', '-', 0, entry[1], 'JUSTID')
    -- An entry that was deleted from outside cannot be claimed.
    if deliveries(tasks, entry[1], ARGV[1]) then
      redis.call('XACK', tasks, 'producers', entry[1])
    end
  end
  moved = moved + #pending
  if #pending < 256 then
    return moved
  end
end
