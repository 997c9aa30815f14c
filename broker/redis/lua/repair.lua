-- KEYS record tasks groups
-- ALWAYS
-- Consumer groups that vanished with their streams, made anew. BUSYGROUP says that one is there.
for _, pair in ipairs({ { tasks, 'producers' }, { groups, 'trainer' } }) do
  local made = redis.pcall('XGROUP', 'CREATE', pair[1], pair[2], '0', 'MKSTREAM')
  if made.err and not string.find(made.err, 'BUSYGROUP') then
    return made
  end
end
return 1
