-- Stands before every script of the trainer: ARGV[1] and ARGV[2] are its incarnation and nonce.
-- A Redis that has a lower incarnation lost its newest writes: the trainer that comes with the higher one has it again.
local held = redis.call('HMGET', state, 'incarnation', 'nonce')
if (tonumber(held[1]) or -1) < tonumber(ARGV[1]) then
  redis.call('HSET', state, 'incarnation', ARGV[1], 'nonce', ARGV[2])
elseif held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
  return redis.error_reply('FENCED ' .. (held[1] or '0'))
end
