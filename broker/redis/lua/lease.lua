-- KEYS record leases
-- ALWAYS
-- ARGV: version and holder, ms
local now = now_ms()
redis.call('ZREMRANGEBYSCORE', leases, '-inf', now)
return redis.call('ZADD', leases, now + ARGV[2], ARGV[1])
