-- ARGV: group id, how many. Returns its newest rounds and the parts split off them, newest first: {reference, status, cause or '', what
-- became of it last or '', its sessions, usable ones, size, deliveries, oldest version or '', when its last member came or '', how many ready
-- groups are before it or '', 1 if the last lease wanted newer tokens, consumer or '', deadline or ''}
local function oldest_of(group)
  local least
  for _, part in pairs(parts_of(group)) do
    least = math.min(least or part.oldest, part.oldest)
  end
  return least or ''
end

local function describe(ref, group)
  local lease = group.status == 'leased' and group.lease and load_packed(leases, group.lease) or {}
  local story = group.status == 'dead' and group.reason or group.fate or ''
  local passed, place = redis.call('ZSCORE', stale, ref) and 1 or 0, redis.call('ZRANK', ready, ref) or ''
  local sessions, usable = group.left or #group.members, #usable_members(group)
  local entry = {ref, group.status, group.cause or '', story, sessions, usable, group.size, group.deliveries, oldest_of(group)}
  for _, each in ipairs({tostring(group.since or ''), place, passed, lease.consumer or '', lease.deadline or ''}) do
    entry[#entry + 1] = each
  end
  return entry
end

local found, newest = {}, tonumber(redis.call('HGET', rounds, ARGV[1]) or '0')
for round = newest, math.max(1, newest - tonumber(ARGV[2]) + 1), -1 do
  local ref = round .. ':' .. ARGV[1]
  for _, each in ipairs(with_parts(ref, load_packed(groups, ref))) do
    local group = load_packed(groups, each)
    if group then
      found[#found + 1] = describe(each, group)
    end
  end
end
return found
