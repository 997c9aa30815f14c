-- KEYS record tasks groups dead settled
-- Answers tasks waiting and held, groups waiting and held, dead.
local tasks_held = redis.call('XPENDING', tasks, 'producers')[1]
local groups_held = redis.call('XPENDING', groups, 'trainer')[1]
local groups_open = redis.call('XLEN', groups) - redis.call('LLEN', settled)
return { redis.call('XLEN', tasks) - tasks_held, tasks_held, groups_open - groups_held, groups_held, redis.call('XLEN', dead) }
