-- KEYS record state steps
-- FENCED
-- ALWAYS
-- ARGV: then version, body, most records. The version that was appended last is not appended again.
local last = redis.call('XREVRANGE', steps, '+', '-', 'COUNT', 1)[1]
if last and field(last, 'version') == ARGV[3] then
  return 0
end
redis.call('XADD', steps, 'MAXLEN', '~', ARGV[5], '*', 'version', ARGV[3], 'body', ARGV[4])
return 1
