-- KEYS record orders
-- ALWAYS
-- ARGV: kind, target, count, reason, most orders kept
return redis.call('XADD', orders, 'MAXLEN', '~', ARGV[5], '*',
  'kind', ARGV[1], 'target', ARGV[2], 'count', ARGV[3], 'reason', ARGV[4])
