-- ARGV: now, seconds without a new member after which a group is given up or 0, what a group needs, minimum, zero variance.
-- Returns how many groups were given up.
go_on_when_full()
local now, patience, needs, minimum = tonumber(ARGV[1]), tonumber(ARGV[2]), ARGV[3], tonumber(ARGV[4])

local function why(group)
  local usable = #usable_members(group)
  local failed, missing = #group.members - usable, math.max(group.size - #group.members, 0)
  local found = usable .. ' of ' .. group.size .. ' members usable, ' .. failed .. ' failed, ' .. missing .. ' never closed'
  return 'incomplete: no member came for ' .. patience .. ' seconds; ' .. found
end

local function give_up(ref, group)
  tally('timed_out')
  local its_needs = apply_rule(group, needs)
  if its_needs == 'require_all' then
    kill(ref, group, 'incomplete', why(group), now)
    return
  end
  group.given_up = true
  local status, cause = 'dropped', 'too_few_usable'
  if its_needs ~= 'drop' then
    status, cause = decide(group, needs, minimum, ARGV[5])
  end
  count_group(group, status)
  move(ref, group, status, cause)
end

expire(now)
if patience <= 0 then
  return 0
end
local refs = redis.call('ZRANGEBYSCORE', filling, '-inf', now - patience, 'LIMIT', 0, 1000)
for _, ref in ipairs(refs) do
  give_up(ref, load_packed(groups, ref))
end
local opened = redis.call('HGETALL', opening)
for i = 1, #opened, 2 do
  if cmsgpack.unpack(opened[i + 1]).at <= now - patience then
    end_opening(opened[i])
  end
end
return #refs
