-- KEYS record dead
-- ARGV: id after which it begins, or '', and the most entries. Answers id and fields of each, without the bodies.
local answer = {}
for _, entry in ipairs(redis.call('XRANGE', dead, ARGV[1] == '' and '-' or '(' .. ARGV[1], '+', 'COUNT', ARGV[2])) do
  local kept = {}
  for i = 1, #entry[2], 2 do
    if entry[2][i] ~= 'body' then
      table.insert(kept, entry[2][i])
      table.insert(kept, entry[2][i + 1])
    end
  end
  table.insert(answer, { entry[1], kept })
end
return answer
