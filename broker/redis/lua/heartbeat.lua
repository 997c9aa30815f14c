-- KEYS record state peers
-- ALWAYS
-- ARGV: name, key of its heartbeat, lease in ms, what it says as JSON, 1 for a producer, most peers, ms of silence; of a
-- trainer also its incarnation and nonce. Of too many peers, those that have been silent so long are forgotten.
if ARGV[8] then
  local held = redis.call('HMGET', state, 'incarnation', 'nonce')
  local newer = (tonumber(held[1]) or 0) - tonumber(ARGV[8])
  if newer > 0 or newer == 0 and held[2] ~= ARGV[9] then
    return redis.error_reply('FENCED ' .. held[1])
  end
end
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
