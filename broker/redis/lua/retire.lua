-- KEYS record peers
-- ARGV: name, key of its heartbeat
redis.call('DEL', ARGV[2])
return redis.call('HDEL', peers, ARGV[1])
