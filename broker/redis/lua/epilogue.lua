-- Stands after every script.
if counters then
  local written = {}
  for name, sum in pairs(sums) do
    table.insert(written, name)
    table.insert(written, sum)
  end
  redis.call('HSET', counters, unpack(written))
end
if left > 0 then
  for i = 2, #KEYS do
    if redis.call('PTTL', KEYS[i]) == -1 then
      redis.call('PEXPIRE', KEYS[i], left)
    end
  end
end
