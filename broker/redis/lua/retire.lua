-- KEYS record state peers
-- ARGV: name, key of its heartbeat
-- The next producer that takes looks what this one may have left.
redis.call('HDEL', state, 'looked')
redis.call('DEL', ARGV[2])
return redis.call('HDEL', peers, ARGV[1])
