-- KEYS record state tasks groups steps dead orders heads peers open published sheet settled manifests leases reigns again pins
-- FENCED
-- ALWAYS
-- ARGV: then status, reason, ms that an ended run is kept, most orders kept
redis.call('HSET', state, 'status', ARGV[3], 'reason', ARGV[4])
redis.call('XADD', orders, 'MAXLEN', '~', ARGV[6], '*', 'kind', 'end', 'target', '', 'count', '0', 'reason', ARGV[4])
redis.call('PEXPIRE', KEYS[1], ARGV[5])
left = tonumber(ARGV[5])
return 1
