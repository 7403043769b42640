-- ARGV: session id, policy, minimum, zero variance. 'gone', or 'leased' and nothing done.
local session_id = ARGV[1]
local ref = redis.call('HGET', members, session_id)
local group = ref and load_packed(groups, ref)
if group and group.status == 'leased' then
  return 'leased'
end
leave_opening(session_id)
redis.call('HDEL', members, session_id)
if not group then
  return 'gone'
end

local function forget()
  for _, queue in ipairs({ready, stale, filling, dead}) do
    redis.call('ZREM', queue, ref)
  end
  redis.call('HDEL', groups, ref)
  -- A later round's number would be taken again if it were forgotten while that round is there.
  if ref == '1:' .. group.group_id and redis.call('HGET', rounds, group.group_id) == '1' then
    redis.call('HDEL', rounds, group.group_id)
  end
end

local kept = {}
for _, member in ipairs(group.members) do
  if member.id ~= session_id then
    kept[#kept + 1] = member
  end
end
group.members = kept
if group.final then
  -- What was acknowledged or given up stays counted.
  group.left = group.left - 1
  if group.left == 0 then
    forget()
  else
    save_group(ref, group)
  end
elseif #kept == 0 then
  redis.call('HINCRBY', counts, group.status, -1)
  forget()
elseif group.status == 'dropped' and (group.given_up or #kept + 1 >= group.size) then
  -- One member less, it would pass for a group that still fills, or for one that is ready.
  finish(ref, group, 'dropped')
elseif group.status == 'dead' then
  save_group(ref, group)
else
  measure(group)
  move(ref, group, decide(group, ARGV[2], tonumber(ARGV[3]), ARGV[4]))
end
return 'gone'
