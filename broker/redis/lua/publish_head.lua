-- KEYS record state manifests heads reigns
-- FENCED
-- ALWAYS
-- ARGV: then incarnation and step of the version, manifest, most notifications kept, most reigns kept, most
-- manifests kept
-- The head only moves forward. Reigns: the first and the newest step that each incarnation published.
local version = ARGV[3] .. '.' .. ARGV[4]
redis.call('HSET', manifests, version, ARGV[5])
local step, reign = tonumber(ARGV[4]), redis.call('HGET', reigns, ARGV[3])
local first, newest = string.match(reign or '', '^(%d+) (%d+)$')
redis.call('HSET', reigns, ARGV[3],
  math.min(step, tonumber(first or step)) .. ' ' .. math.max(step, tonumber(newest or step)))
if redis.call('HLEN', reigns) > tonumber(ARGV[7]) then
  local all = redis.call('HGETALL', reigns)
  local oldest = all[1]
  for i = 3, #all, 2 do
    if (tonumber(all[i]) or -1) < (tonumber(oldest) or -1) then
      oldest = all[i]
    end
  end
  redis.call('HDEL', reigns, oldest)
end
if redis.call('HLEN', manifests) > tonumber(ARGV[8]) then
  local oldest, its_incarnation, its_step
  for _, name in ipairs(redis.call('HKEYS', manifests)) do
    local i, s = string.match(name, '^(%d+)%.(%d+)$')
    i, s = tonumber(i) or -1, tonumber(s) or -1
    if not oldest or i < its_incarnation or (i == its_incarnation and s < its_step) then
      oldest, its_incarnation, its_step = name, i, s
    end
  end
  redis.call('HDEL', manifests, oldest)
end
local head = redis.call('HGET', state, 'head')
if head then
  local incarnation, step = string.match(head, '^(%d+)%.(%d+)$')
  incarnation, step = tonumber(incarnation), tonumber(step)
  local later = tonumber(ARGV[3]) > incarnation or (tonumber(ARGV[3]) == incarnation and tonumber(ARGV[4]) > step)
  if not later then
    return 0
  end
end
redis.call('HSET', state, 'head', version, 'coming', version)
redis.call('XADD', heads, 'MAXLEN', '~', ARGV[6], '*', 'version', version)
return 1
