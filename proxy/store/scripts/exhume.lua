-- ARGV: retry or drop, now, what a group needs, minimum, zero variance, then references or group ids.
-- Returns {'ok', {references of the dead groups named}}, or {'superseded', reference} without a change.
go_on_when_full()
local action, now = ARGV[1], tonumber(ARGV[2])

local function find_dead(name)
  if redis.call('ZSCORE', dead, name) then
    return {name}
  end
  local refs = {}
  for round = 1, tonumber(redis.call('HGET', rounds, name) or '0') do
    local ref = round .. ':' .. name
    for _, each in ipairs(with_parts(ref, load_packed(groups, ref))) do
      if redis.call('ZSCORE', dead, each) then
        refs[#refs + 1] = each
      end
    end
  end
  return refs
end

-- Decides anew: members may have been deleted meanwhile.
local function decide_again(group)
  return decide(group, ARGV[3], tonumber(ARGV[4]), ARGV[5])
end

local refs = {}
for i = 6, #ARGV do
  for _, ref in ipairs(find_dead(ARGV[i])) do
    refs[#refs + 1] = ref
  end
end

for _, ref in ipairs(action == 'retry' and refs or {}) do
  local group = load_packed(groups, ref)
  -- New members join only the last round of a group id, and no group with a part already leased.
  local last = redis.call('HGET', rounds, group.group_id) .. ':' .. group.group_id
  if decide_again(group) == 'filling' and (group.given or last ~= ref) then
    return {'superseded', ref}
  end
end
for _, ref in ipairs(refs) do
  local group = load_packed(groups, ref)
  redis.call('ZREM', dead, ref)
  if action == 'drop' then
    finish(ref, group, 'dropped', 'discarded')
  else
    tally('retried')
    group.deliveries, group.since, group.reason = 0, now, nil
    measure(group)
    local status, cause = decide_again(group)
    move(ref, group, status, cause)
  end
end
return {'ok', refs}
