-- KEYS record state tasks groups deleted
-- ALONE
-- ARGV: the record without its time, as JSON object; creation time or 0. Answers 0 when the id is taken.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
redis.call('DEL', KEYS[5])
redis.call('SET', KEYS[1], ARGV[1])
redis.call('HSET', KEYS[2], 'status', 'running', 'reason', '', 'incarnation', '0', 'nonce', '', 'step', '0', 'cursor', '0')
redis.call('XGROUP', 'CREATE', KEYS[3], 'producers', '0', 'MKSTREAM')
redis.call('XGROUP', 'CREATE', KEYS[4], 'trainer', '0', 'MKSTREAM')
return 1
