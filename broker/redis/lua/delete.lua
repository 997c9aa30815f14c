-- KEYS record deleted
-- ALONE
-- ARGV: ms that it is remembered. Answers how many keys have left: none where there is no such run.
-- The record first, without which no script writes: what is deleted does not come back. As the first write is an allowed
-- one, a run can also be deleted from a Redis that is full.
local gone = redis.call('UNLINK', KEYS[1])
if gone == 1 then
  redis.call('SET', KEYS[2], '1', 'PX', ARGV[1])
end
return gone
