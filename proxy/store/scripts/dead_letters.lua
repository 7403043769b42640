-- ARGV: limit, cursor or '', part of the reason or '', how many to examine.
-- Returns {the next cursor or '', {reference, group id, {session ids}, deliveries, reason, died_at}, ...}
local limit, cursor, part, looked_at = tonumber(ARGV[1]), ARGV[2], ARGV[3], tonumber(ARGV[4])

-- The letter at the cursor may be gone by now: adding it for a moment finds its place.
local function place_after(at, ref)
  local gone = redis.call('ZADD', dead, 'NX', at, ref) == 1
  local place = redis.call('ZREVRANK', dead, ref)
  if gone then
    redis.call('ZREM', dead, ref)
    return place
  end
  return place + 1
end

local first = 0
if cursor ~= '' then
  local at, ref = string.match(cursor, '^([^:]+):(.*)$')
  first = place_after(at, ref)
end
local found = redis.call('ZREVRANGE', dead, first, first + looked_at, 'WITHSCORES')
local answer, last = {''}, ''
for i = 1, #found, 2 do
  if i > 2 * looked_at or #answer > limit then
    answer[1] = last
    break
  end
  local group = load_packed(groups, found[i])
  if string.find(group.reason, part, 1, true) then
    local ids = session_ids(group.members)
    answer[#answer + 1] = {found[i], group.group_id, ids, group.deliveries, group.reason, found[i + 1]}
  end
  last = found[i + 1] .. ':' .. found[i]
end
return answer
