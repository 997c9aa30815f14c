-- KEYS record state
-- ALWAYS
-- ARGV: what it is if there is none. Answers the run's secret.
if redis.call('HEXISTS', state, 'secret') == 0 then
  redis.call('HSET', state, 'secret', ARGV[1])
end
return redis.call('HGET', state, 'secret')
