-- KEYS record tasks groups open sheet settled
-- Answers the sheet and {kind, outstanding} of each kind.
-- Every entry of `tasks`, and every one of `groups` that is not settled, stands for one open task. Where the lengths
-- say so, the open ones are counted by kind; where they do not, each open task is looked up in the streams.
local all, kinds = redis.call('HGETALL', open), {}
local entries = redis.call('XLEN', tasks) + redis.call('XLEN', groups) - redis.call('LLEN', settled)
local whole = entries == #all / 2
for i = 1, #all, 2 do
  local kind, where, id = string.match(all[i + 1], '^(%S+) (%S+) (%S+)$')
  local stream = where == 't' and tasks or groups
  if whole or #redis.call('XRANGE', stream, id, id) == 1 then
    kinds[kind] = (kinds[kind] or 0) + 1
  end
end
local outstanding = {}
for kind, number in pairs(kinds) do
  table.insert(outstanding, { kind, number })
end
return { redis.call('HGETALL', sheet), outstanding }
