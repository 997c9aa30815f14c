-- KEYS record peers
-- ARGV: prefix of heartbeats, ms after which one that fell silent is forgotten
-- Answers name, what it said, 1 when alive. What no service said is left out.
local all, answer, now = redis.call('HGETALL', peers), {}, now_ms()
for i = 1, #all, 2 do
  local at, said = string.match(all[i + 1], '^(%d+) (.*)$')
  local alive = at and redis.call('EXISTS', ARGV[1] .. all[i])
  if alive == 0 and now - tonumber(at) > tonumber(ARGV[2]) then
    redis.call('HDEL', peers, all[i])
  elseif at then
    table.insert(answer, { all[i], said, alive })
  end
end
return answer
