-- Stands before every script of the trainer: ARGV[1] and ARGV[2] are its incarnation and nonce.
local held = redis.call('HMGET', state, 'incarnation', 'nonce')
if held[1] ~= ARGV[1] or held[2] ~= ARGV[2] then
  return redis.error_reply('FENCED ' .. (held[1] or '0'))
end
