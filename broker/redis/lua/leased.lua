-- KEYS record leases
return redis.call('ZRANGEBYSCORE', leases, '(' .. now_ms(), '+inf')
