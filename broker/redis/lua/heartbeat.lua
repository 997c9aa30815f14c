-- KEYS record state peers
-- ALWAYS
-- ARGV: name, key of its heartbeat, lease in ms, what it says as JSON, 1 for a producer, most peers, ms of silence
-- Of too many, those that have been silent so long are forgotten.
beat(state, ARGV[2], ARGV[3], ARGV[5] == '1')
redis.call('HSET', peers, ARGV[1], now_ms() .. ' ' .. ARGV[4])
if redis.call('HLEN', peers) > tonumber(ARGV[6]) then
  local all, now = redis.call('HGETALL', peers), now_ms()
  for i = 1, #all, 2 do
    if now - (tonumber(string.match(all[i + 1], '^(%d+) ')) or 0) > tonumber(ARGV[7]) then
      redis.call('HDEL', peers, all[i])
    end
  end
end
return 1
