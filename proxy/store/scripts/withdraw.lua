-- ARGV: session id, policy, minimum, zero variance. 'gone', or 'leased' and nothing done.
local session_id = ARGV[1]
local ref = redis.call('HGET', members, session_id)
local group = ref and load_packed(groups, ref)
if group and group.status == 'leased' then
  return 'leased'
end
retract(session_id)
if not group then
  return 'gone'
end
redis.call('HDEL', members, session_id)
if settled(group) then
  return 'gone'
end
local kept = {}
for _, member in ipairs(group.members) do
  if member.id ~= session_id then
    kept[#kept + 1] = member
  end
end
group.members = kept
if #kept == 0 then
  move(ref, group, 'filling')
  redis.call('HINCRBY', counts, 'filling', -1)
  redis.call('HDEL', groups, ref)
  return 'gone'
end
measure(group)
move(ref, group, decide(group, ARGV[2], tonumber(ARGV[3]), ARGV[4]))
return 'gone'
