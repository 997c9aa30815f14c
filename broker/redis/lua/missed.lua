-- KEYS record state groups
-- FENCED
-- ARGV: then consumer, the most entries, then ids that it knows of. Answers other ids that are pending to it.
local most, known, missed, after = tonumber(ARGV[4]), {}, {}, '-'
for i = 5, #ARGV do
  known[ARGV[i]] = true
end
while true do
  local pending = redis.call('XPENDING', groups, 'trainer', after, '+', 256, ARGV[3])
  for _, entry in ipairs(pending) do
    if not known[entry[1]] then
      table.insert(missed, entry[1])
      if #missed >= most then
        return missed
      end
    end
  end
  if #pending < 256 then
    return missed
  end
  after = '(' .. pending[256][1]
end
