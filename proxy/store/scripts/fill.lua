-- ARGV: group id, size, session id, usable, reward or '', rows, oldest version, policy, minimum, zero variance. The status.
local group_id, size, session_id, policy = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[8]
local member = {
  id = session_id,
  usable = ARGV[4] == '1',
  reward = tonumber(ARGV[5]),
  rows = tonumber(ARGV[6]),
  oldest = tonumber(ARGV[7]),
}

local function new_group()
  return {group_id = group_id, size = size, deliveries = 0, members = {}}
end

local function place_of_newcomer()
  local round = tonumber(redis.call('HGET', rounds, group_id) or '1')
  local group = load_packed(groups, round .. ':' .. group_id)
  if group and full(group, policy) then
    round, group = round + 1, nil
  end
  redis.call('HSET', rounds, group_id, round)
  return round .. ':' .. group_id, group or new_group()
end

local ref, group = redis.call('HGET', members, session_id), nil
if ref then
  group = load_packed(groups, ref)
  if settled(group) then
    retract(session_id)
    return group.status
  end
  for i, old in ipairs(group.members) do
    if old.id == session_id then
      group.members[i] = member
    end
  end
else
  ref, group = place_of_newcomer()
  group.members[#group.members + 1] = member
  redis.call('HSET', members, session_id, ref)
end
-- Members that disagree on the size: the greatest holds, or an unfinished group would pass for a whole one.
group.size = math.max(group.size, size)
measure(group)
move(ref, group, decide(group, policy, tonumber(ARGV[9]), ARGV[10]))
retract(session_id)
return group.status
