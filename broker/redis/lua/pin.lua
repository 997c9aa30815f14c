-- KEYS record pins
-- ARGV: version, most pins. Answers 0 when there are as many already.
if redis.call('SISMEMBER', pins, ARGV[1]) == 0 and redis.call('SCARD', pins) >= tonumber(ARGV[2]) then
  return 0
end
redis.call('SADD', pins, ARGV[1])
return 1
