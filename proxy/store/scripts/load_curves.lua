-- ARGV: axis, how many of the newest cells (0: all), how many cells at once, the curve to go on after or '', and runs (none: all of them).
-- Returns whether there are more curves, and by ascending name: the curve, its starts and its cells, each a packed list.
local wanted, found = {}, {}
for at = 5, #ARGV do
  wanted[ARGV[at]] = true
end
for _, curve in ipairs(redis.call('HKEYS', curves)) do
  local axis, run = string.match(curve, '^(.-)=(.-)=')
  if axis == ARGV[1] and (#ARGV < 5 or wanted[run]) and curve > ARGV[4] then
    found[#found + 1] = curve
  end
end
table.sort(found)

local newest, room, answer = tonumber(ARGV[2]), tonumber(ARGV[3]), {0}
for _, curve in ipairs(found) do
  if room <= 0 then
    answer[1] = 1
    break
  end
  local starts, fields = {}, {}
  local kept = cmsgpack.unpack(redis.call('HGET', curves, curve))
  for at = newest > 0 and math.max(1, #kept - newest + 1) or 1, #kept do
    starts[#starts + 1] = kept[at]
    fields[#fields + 1] = string.format('%d', kept[at]) .. '=' .. curve
  end
  answer[#answer + 1] = curve
  answer[#answer + 1] = cmsgpack.pack(starts)
  -- The packed cells one after the other, behind the head of a packed list of up to 65,535.
  local head = string.char(220, math.floor(#fields / 256), #fields % 256)
  answer[#answer + 1] = #fields > 0 and head .. table.concat(redis.call('HMGET', cells, unpack(fields))) or head
  room = room - #fields
end
return answer
