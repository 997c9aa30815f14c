-- KEYS record state groups
-- FENCED
-- ARGV: then consumer, most entries
-- Deliveries of other consumers (an earlier trainer, or one that was fenced while it waited) become this one's.
-- Answers the ids; a consumer that is left with nothing is forgotten.
local me, most, adopted = ARGV[3], tonumber(ARGV[4]), {}
for _, info in ipairs(redis.call('XINFO', 'CONSUMERS', groups, 'trainer')) do
  local name = info[2]
  if name ~= me then
    for _, pending in ipairs(redis.call('XPENDING', groups, 'trainer', '-', '+', most, name)) do
      local got = redis.call('XCLAIM', groups, 'trainer', me, 0, pending[1], 'JUSTID')
      if #got == 1 then
        table.insert(adopted, got[1])
      else
        redis.call('XACK', groups, 'trainer', pending[1])
      end
    end
    local rest = redis.call('XPENDING', groups, 'trainer', '-', '+', 1, name)
    if #rest == 0 then
      redis.call('XGROUP', 'DELCONSUMER', groups, 'trainer', name)
    end
  end
end
return adopted
