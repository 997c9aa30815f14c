-- KEYS record orders
-- ALWAYS
-- ARGV: kind, target, count, reason
return redis.call('XADD', orders, 'MAXLEN', '~', 1024, '*',
  'kind', ARGV[1], 'target', ARGV[2], 'count', ARGV[3], 'reason', ARGV[4])
