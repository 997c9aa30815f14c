-- KEYS record state groups
-- FENCED
-- ARGV: then consumer, then ids that it knows of. Answers at most 1024 other ids that are pending to it.
local known, missed, after = {}, {}, '-'
for i = 4, #ARGV do
  known[ARGV[i]] = true
end
while true do
  local pending = redis.call('XPENDING', groups, 'trainer', after, '+', 256, ARGV[3])
  for _, entry in ipairs(pending) do
    if not known[entry[1]] and #missed < 1024 then
      table.insert(missed, entry[1])
    end
  end
  if #pending < 256 then
    return missed
  end
  after = '(' .. pending[256][1]
end
