-- KEYS record state places moves
-- ALWAYS
-- ARGV: device, holder, lease in ms (0 gives the place up), most notifications kept; without a holder it only looks
-- Answers who stands in line for the device, in order: the first has it. Places of the dead are taken from those who
-- look, so that one whose lease ran out while nobody looked has lost nothing.
local device, holder, lease = ARGV[1], ARGV[2], tonumber(ARGV[3])
heard(state, math.max(lease, 1000), false)
local now, mercy = now_ms(), tonumber(redis.call('HGET', state, 'mercy') or 0)
local all, line, last, mine, moved = redis.call('HGETALL', places), {}, 0, nil, false
for i = 1, #all, 2 do
  local at, name = string.match(all[i], '^(%S+) (%S+)$')
  local number, ends = string.match(all[i + 1], '^(%d+) (%d+)$')
  number, ends = tonumber(number), tonumber(ends)
  if not number or name ~= holder and ends < now and now >= mercy then
    redis.call('HDEL', places, all[i])
    moved = true
  else
    last = math.max(last, number)
    if at == device and name == holder then
      mine = number
    elseif at == device then
      table.insert(line, { number, name })
    end
  end
end
if holder ~= '' and (lease > 0 or mine) then
  local place = device .. ' ' .. holder
  moved = moved or (lease > 0) ~= (mine ~= nil)
  if lease > 0 then
    mine = mine or last + 1
    redis.call('HSET', places, place, string.format('%d %d', mine, now + lease))
    table.insert(line, { mine, holder })
  else
    redis.call('HDEL', places, place)
  end
end
if moved then
  redis.call('XADD', moves, 'MAXLEN', '~', ARGV[4], '*', 'device', device)
end
table.sort(line, function(a, b)
  return a[1] < b[1]
end)
local names = {}
for i, one in ipairs(line) do
  names[i] = one[2]
end
return names
