-- KEYS record state tasks groups reigns deleted
-- ALONE
-- ARGV: incarnation, nonce, the record, ms that it is kept or 0 for ever, status, reason, step, cursor, replays, then
-- incarnation and steps of each reign
-- Puts back what a Redis that was emptied, or lost its newest writes, does not have of the run itself.
if redis.call('EXISTS', KEYS[6]) == 1 then
  return redis.error_reply('DELETED')
end
-- An allowed write first: what follows slips past maxmemory.
redis.call('DEL', KEYS[1] .. ':none')
local held = redis.call('HMGET', KEYS[2], 'incarnation', 'nonce', 'step', 'cursor', 'replays')
local incarnation = tonumber(held[1]) or -1
if incarnation > tonumber(ARGV[1]) or (incarnation == tonumber(ARGV[1]) and held[2] ~= ARGV[2]) then
  return redis.error_reply('FENCED ' .. held[1])
end
redis.call('HSET', KEYS[2], 'incarnation', ARGV[1], 'nonce', ARGV[2],
  'step', math.max(tonumber(held[3]) or 0, ARGV[7]),
  'cursor', math.max(tonumber(held[4]) or 0, ARGV[8]),
  'replays', math.max(tonumber(held[5]) or 0, ARGV[9]))
if redis.call('EXISTS', KEYS[1]) == 0 then
  redis.call('SET', KEYS[1], ARGV[3])
  redis.call('HSET', KEYS[2], 'status', ARGV[5], 'reason', ARGV[6])
end
for i = 3, 4 do
  local made = redis.pcall('XGROUP', 'CREATE', KEYS[i], i == 3 and 'producers' or 'trainer', '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then
    return made
  end
end
for i = 10, #ARGV, 2 do
  local first, newest = string.match(ARGV[i + 1], '^(%d+) (%d+)$')
  local there = redis.call('HGET', KEYS[5], ARGV[i])
  local f, n = string.match(there or '', '^(%d+) (%d+)$')
  redis.call('HSET', KEYS[5], ARGV[i], math.min(first, f or first) .. ' ' .. math.max(newest, n or newest))
end
if ARGV[4] ~= '0' then
  for i = 1, #KEYS do
    if redis.call('PTTL', KEYS[i]) == -1 then
      redis.call('PEXPIRE', KEYS[i], ARGV[4])
    end
  end
end
return 1
