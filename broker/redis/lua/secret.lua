-- KEYS record state
-- ALWAYS
-- ARGV: what it is if there is none. Answers the run's secret.
redis.call('HSETNX', state, 'secret', ARGV[1])
return redis.call('HGET', state, 'secret')
