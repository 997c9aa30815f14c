-- KEYS record state tasks groups steps dead orders heads peers open published sheet settled manifests leases reigns again pins
-- ALWAYS
-- ARGV: nonce, incarnation of the newest checkpoint. A repeated call with the same nonce changes nothing.
local held = redis.call('HMGET', state, 'incarnation', 'nonce')
if held[2] == ARGV[1] then
  return tonumber(held[1])
end
local incarnation = math.max(tonumber(held[1] or '0'), tonumber(ARGV[2])) + 1
redis.call('HSET', state, 'incarnation', incarnation, 'nonce', ARGV[1], 'status', 'running', 'reason', '')
-- A run that had ended goes on: its keys stay.
for i = 1, #KEYS do
  redis.call('PERSIST', KEYS[i])
end
left = -1
return incarnation
