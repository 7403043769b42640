-- ARGV: group id, size, session id, usable, reward or '', rows, oldest version, now, what a group needs, minimum, zero variance, the
-- session's own rule on these three (packed) or '', whether the session is complete, its run, what it adds to the run's numbers (packed),
-- then for each other policy its name, rows and oldest version. Returns the group's status.
go_on_when_full()
local group_id, size, session_id, needs = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[9]
local member = {
  id = session_id,
  usable = ARGV[4] == '1',
  reward = tonumber(ARGV[5]),
  rows = tonumber(ARGV[6]),
  oldest = tonumber(ARGV[7]),
  complete = ARGV[13] == '1',
}
for i = 16, #ARGV, 3 do
  member.named = member.named or {}
  member.named[ARGV[i]] = {rows = tonumber(ARGV[i + 1]), oldest = tonumber(ARGV[i + 2])}
  redis.call('SADD', policies, ARGV[i])
end

local function join_round()
  local round, group = newcomers_round(group_id, needs)
  redis.call('HSET', rounds, group_id, round)
  end_opening(group_id)
  return round .. ':' .. group_id, group or {group_id = group_id, run = ARGV[14], size = size, deliveries = 0, members = {}}
end

local ref, group = redis.call('HGET', members, session_id), nil
if ref then
  group = load_packed(groups, ref)
  if is_settled(group) then
    retract(session_id)
    save_group(ref, group) -- a write for WAIT to wait for
    return group.status
  end
  for i, old in ipairs(group.members) do
    if old.id == session_id then
      group.members[i] = member
    end
  end
else
  ref, group = join_round()
  group.members[#group.members + 1] = member
  group.since = tonumber(ARGV[8])
  redis.call('HSET', members, session_id, ref)
end
-- When members disagree on the size the greatest counts, or an incomplete group would pass for a complete one.
group.size = math.max(group.size, size)
if ARGV[12] ~= '' then
  group.rule = cmsgpack.unpack(ARGV[12])
end
measure(group)
group.counted = group.counted or counted_run(group.run, tonumber(ARGV[8]))
count_session(session_id, cmsgpack.unpack(ARGV[15]), counted_run(ARGV[14], tonumber(ARGV[8])), tonumber(ARGV[8]))
local status, cause = decide(group, needs, tonumber(ARGV[10]), ARGV[11])
count_group(group, status)
-- Every member has come, and failed ones are not replaced.
if status == 'filling' and group.rule and group.rule.replacements == false and #group.members >= group.size then
  local usable = #usable_members(group)
  local found = usable .. ' of ' .. group.size .. ' members usable, ' .. #group.members - usable .. ' failed'
  kill(ref, group, 'incomplete', 'incomplete: ' .. found .. ', and they are not replaced', tonumber(ARGV[8]))
else
  move(ref, group, status, cause)
end
retract(session_id)
return group.status
