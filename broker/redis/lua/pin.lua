-- KEYS record pins
-- ARGV: version, most pins. Answers 0 when there are as many already.
if redis.call('HEXISTS', pins, ARGV[1]) == 0 and redis.call('HLEN', pins) >= tonumber(ARGV[2]) then
  return 0
end
redis.call('HSET', pins, ARGV[1], '1')
return 1
