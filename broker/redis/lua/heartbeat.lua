-- KEYS record peers
-- ALWAYS
-- ARGV: name, key of its heartbeat, lease in ms, what it says as JSON
if redis.call('PEXPIRE', ARGV[2], ARGV[3]) == 0 then
  redis.call('SET', ARGV[2], '1', 'PX', ARGV[3])
end
redis.call('HSET', peers, ARGV[1], now_ms() .. ' ' .. ARGV[4])
return 1
