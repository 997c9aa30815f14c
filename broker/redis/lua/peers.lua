-- KEYS record peers
-- ARGV: prefix of heartbeats, ms after which one that fell silent is forgotten
-- Answers name, what it said, 1 when alive.
local all, answer, now = redis.call('HGETALL', peers), {}, now_ms()
for i = 1, #all, 2 do
  local name, said = all[i], all[i + 1]
  local alive = redis.call('EXISTS', ARGV[1] .. name)
  local space = string.find(said, ' ', 1, true)
  if alive == 0 and now - tonumber(string.sub(said, 1, space - 1)) > tonumber(ARGV[2]) then
    redis.call('HDEL', peers, name)
  else
    table.insert(answer, { name, string.sub(said, space + 1), alive })
  end
end
return answer
