-- KEYS record state
-- FENCED
-- ALWAYS
-- ARGV: then step
return redis.call('HSET', state, 'step', ARGV[3])
