-- KEYS record state manifests heads
-- FENCED
-- ALWAYS
-- ARGV: then incarnation and step of the version, manifest, most notifications kept. The head only moves forward.
local version = ARGV[3] .. '.' .. ARGV[4]
redis.call('HSET', manifests, version, ARGV[5])
local head = redis.call('HGET', state, 'head')
if head then
  local incarnation, step = string.match(head, '^(%d+)%.(%d+)$')
  incarnation, step = tonumber(incarnation), tonumber(step)
  local later = tonumber(ARGV[3]) > incarnation or (tonumber(ARGV[3]) == incarnation and tonumber(ARGV[4]) > step)
  if not later then
    return 0
  end
end
redis.call('HSET', state, 'head', version)
redis.call('XADD', heads, 'MAXLEN', '~', ARGV[6], '*', 'version', version)
return 1
