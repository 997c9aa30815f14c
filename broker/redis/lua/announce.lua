-- KEYS record state manifests heads
-- FENCED
-- ALWAYS
-- ARGV: then version, manifest, most notifications kept
redis.call('HSET', manifests, ARGV[3], ARGV[4])
redis.call('HSET', state, 'coming', ARGV[3])
redis.call('XADD', heads, 'MAXLEN', '~', ARGV[5], '*', 'version', ARGV[3])
return 1
