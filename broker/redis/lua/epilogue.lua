-- Stands after every script.
if left > 0 then
  for i = 2, #KEYS do
    if redis.call('PTTL', KEYS[i]) == -1 then
      redis.call('PEXPIRE', KEYS[i], left)
    end
  end
end
