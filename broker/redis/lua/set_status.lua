-- KEYS record state tasks groups steps dead orders heads peers open published sheet settled manifests leases reigns again pins
-- ALWAYS
-- ARGV: status, reason, ms that a run with this status is kept, or 0 for ever
redis.call('HSET', state, 'status', ARGV[1], 'reason', ARGV[2])
if ARGV[3] ~= '0' then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
  left = tonumber(ARGV[3])
end
return 1
