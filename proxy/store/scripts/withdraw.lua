-- ARGV: session id, what a group needs, minimum, zero variance, 1 to take back what the session adds to the numbers of the run.
-- Returns 'gone', or 'leased' without a change.
go_on_when_full()
local session_id = ARGV[1]
local ref = redis.call('HGET', members, session_id)
local group = ref and load_packed(groups, ref)
local refs = group and with_parts(ref, group) or {}
for _, each in ipairs(refs) do
  local part = load_packed(groups, each)
  if part and part.status == 'leased' then
    return 'leased'
  end
end
leave_opening(session_id)
redis.call('HDEL', members, session_id)
if ARGV[5] == '1' then
  uncount_session(session_id)
else
  redis.call('HDEL', outcomes, session_id)
end

local function forget(each, gone)
  for _, queue in ipairs({ready, stale, filling, dead}) do
    redis.call('ZREM', queue, each)
  end
  redis.call('HDEL', groups, each)
  -- Only of round 1: forgetting a later round's number would give it out again while that round exists.
  if each == '1:' .. gone.group_id and redis.call('HGET', rounds, gone.group_id) == '1' then
    redis.call('HDEL', rounds, gone.group_id)
  end
end

local function kept_members(left)
  local kept = {}
  for _, member in ipairs(left.members) do
    if member.id ~= session_id then
      kept[#kept + 1] = member
    end
  end
  return kept
end

local function take_out(each, left)
  left.members = kept_members(left)
  if left.final then
    -- Acknowledged and dropped groups stay counted.
    left.left = left.left - 1
    if left.left == 0 then
      forget(each, left)
    else
      save_group(each, left)
    end
  elseif #left.members == 0 then
    count_state(left, -1)
    forget(each, left)
  elseif left.status == 'dropped' and (left.given_up or #left.members + 1 >= left.size) then
    -- With one member less it would pass for a filling or a ready group.
    finish(each, left, 'dropped', 'deleted')
  elseif left.status == 'dead' then
    save_group(each, left)
  elseif left.given or left.of then
    -- The place stays empty: the group's other rows may have been trained already.
    finish(each, left, 'dropped', 'deleted')
  else
    measure(left)
    local status, cause = decide(left, ARGV[2], tonumber(ARGV[3]), ARGV[4])
    count_group(left, status)
    move(each, left, status, cause)
  end
end

for _, each in ipairs(refs) do
  local left = load_packed(groups, each)
  if left then
    take_out(each, left)
  end
end
return 'gone'
