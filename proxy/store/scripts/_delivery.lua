-- A group: {group_id, size, status, place, deliveries, oldest, rows, lease, since, members = {{id, usable, reward, rows, oldest}}}
-- status: filling, ready, dropped, leased, acked, dead. A ready group that was passed over sits in `stale`.
-- `since` is when its last member came, `given_up` that no more are waited for, `stale` that its lease asked for newer rows,
-- `leased_at` the weight version it was leased under, `passed` that it was counted as stale before, `final` that nothing changes it any more, `left` its sessions by then.
redis.replicate_commands()

local groups, rounds, members, ready, stale = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local leases, deadlines, ended, dead = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local counts, announced, requests = KEYS[10], KEYS[11], KEYS[12]
local filling, claims, opening, admitted = KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local totals, arrivals, unseen = KEYS[17], KEYS[18], KEYS[19]

local function tally(what)
  redis.call('HINCRBY', totals, what, 1)
end

local told = false

-- Whoever waits for groups is woken. Once a script is enough; the stream keeps its last entry only.
local function tell_arrival()
  if not told then
    told = true
    redis.call('XADD', arrivals, 'MAXLEN', 1, '*', 'ready', 1)
  end
end

local function load_packed(key, field)
  local packed = redis.call('HGET', key, field)
  return packed and cmsgpack.unpack(packed)
end

local function save_group(ref, group)
  redis.call('HSET', groups, ref, cmsgpack.pack(group))
end

local function retract(session_id)
  redis.call('ZREM', announced, session_id)
  redis.call('HDEL', requests, session_id)
end

-- Moves a group to `status`, with the counts and the queue it belongs to.
local function move(ref, group, status)
  if group.status ~= status then
    if group.status then
      redis.call('HINCRBY', counts, group.status, -1)
    end
    redis.call('HINCRBY', counts, status, 1)
    tally(status)
  end
  redis.call('ZREM', stale, ref)
  if status == 'filling' then
    redis.call('ZADD', filling, group.since, ref)
  else
    redis.call('ZREM', filling, ref)
  end
  if status == 'ready' then
    group.place = group.place or redis.call('HINCRBY', counts, 'place', 1)
    redis.call('ZADD', ready, group.place, ref)
    tell_arrival()
  else
    redis.call('ZREM', ready, ref)
  end
  group.status = status
  save_group(ref, group)
end

local function settled(group)
  return group.status == 'leased' or group.status == 'acked' or group.status == 'dead' or group.final
end

-- Nothing changes the group any more, but its sessions are still known to have been in it until each is deleted.
local function finish(ref, group, status)
  group.left, group.final = #group.members, true
  group.members, group.lease, group.fate = {}, nil, nil
  move(ref, group, status)
end

local function usable_members(group)
  local usable = {}
  for _, member in ipairs(group.members) do
    if member.usable then
      usable[#usable + 1] = member
    end
  end
  return usable
end

local function session_ids(list)
  local ids = {}
  for _, member in ipairs(list) do
    ids[#ids + 1] = member.id
  end
  return ids
end

-- Whether the next session of this group id belongs to a new round.
local function full(group, policy)
  if settled(group) or group.given_up then
    return true
  end
  if policy == 'require_all' then
    return #usable_members(group) >= group.size
  end
  return #group.members >= group.size
end

-- The round that a newcomer of this group id belongs to, and its group unless it is still to be made.
local function newcomers_round(group_id, policy)
  local round = tonumber(redis.call('HGET', rounds, group_id) or '1')
  local group = load_packed(groups, round .. ':' .. group_id)
  while group and full(group, policy) do
    round = round + 1
    group = load_packed(groups, round .. ':' .. group_id)
  end
  return round, group
end

local function same_rewards(usable)
  for _, member in ipairs(usable) do
    if member.reward ~= usable[1].reward then
      return false
    end
  end
  return true
end

-- A pure function of the members and the policy, so that a corrected reward decides anew.
local function decide(group, policy, minimum, zero_variance)
  local usable = usable_members(group)
  if policy == 'drop' and #usable < #group.members then
    return 'dropped'
  end
  if policy == 'require_all' then
    if #usable < group.size then
      return 'filling'
    end
  elseif #group.members < group.size and not group.given_up then
    return 'filling'
  elseif #usable < math.max(minimum, 1) then
    return 'dropped'
  end
  if zero_variance == 'drop' and group.size > 1 and same_rewards(usable) then
    return 'dropped'
  end
  return 'ready'
end

local function measure(group)
  group.rows, group.oldest = 0, nil
  for _, member in ipairs(usable_members(group)) do
    group.rows = group.rows + member.rows
    if not group.oldest or member.oldest < group.oldest then
      group.oldest = member.oldest
    end
  end
  group.oldest = group.oldest or 0
end

-- The groups that were leased under the newest version that a lease or an admission has seen: version_seen, taken.
local function version_seen()
  return tonumber(redis.call('HGET', counts, 'version_seen') or '-1')
end

local function see_version(version)
  if version > version_seen() then
    redis.call('HSET', counts, 'version_seen', version, 'taken', 0)
  end
end

local function count_taken(group, version)
  group.leased_at = version
  if version >= 0 and version == version_seen() then
    redis.call('HINCRBY', counts, 'taken', 1)
  end
end

-- The group comes to nothing under the version it was leased under.
local function uncount_taken(group)
  if group.leased_at and group.leased_at >= 0 and group.leased_at == version_seen() then
    redis.call('HINCRBY', counts, 'taken', -1)
  end
  group.leased_at = nil
end

-- Groups that some trainer has and that are not in the weights of `version` yet. One that acknowledges first and then publishes
-- has none leased meanwhile; one that fetches ahead has more leased than it took under this version.
local function in_training(version)
  local taken = version >= 0 and version == version_seen() and tonumber(redis.call('HGET', counts, 'taken')) or 0
  return math.max(taken, tonumber(redis.call('HGET', counts, 'leased') or '0'))
end

local function undelivered()
  local opened = redis.call('HLEN', opening)
  return tonumber(redis.call('HGET', counts, 'filling') or '0') + redis.call('ZCARD', ready) + opened
end

-- How many versions will have come by the time a group that is begun now is leased, when groups are taken in their order.
local function versions_ahead(version, groups_per_version)
  return math.floor((undelivered() + in_training(version)) / groups_per_version)
end

local function kill(ref, group, reason, now)
  group.reason, group.lease, group.stale = reason, nil, nil
  redis.call('ZADD', dead, now, ref)
  move(ref, group, 'dead')
end

local function end_lease(lease_id, lease, status, now)
  lease.status = status
  redis.call('HSET', leases, lease_id, cmsgpack.pack(lease))
  redis.call('ZREM', deadlines, lease_id)
  redis.call('ZADD', ended, now, lease_id)
end

local function put_back(lease_id, lease, status, now)
  for _, ref in ipairs(lease.refs) do
    local group = load_packed(groups, ref)
    uncount_taken(group)
    group.lease, group.stale = nil, nil
    group.fate = (status == 'expired' and 'lease expired' or 'given back') .. ' by ' .. lease.consumer
    tally(status)
    move(ref, group, 'ready')
  end
  end_lease(lease_id, lease, status, now)
end

local function expire(now)
  for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now)) do
    put_back(lease_id, load_packed(leases, lease_id), 'expired', now)
  end
end

local function group_ids(lease)
  local ids = {}
  for _, ref in ipairs(lease.refs) do
    ids[#ids + 1] = load_packed(groups, ref).group_id
  end
  return ids
end

-- The lease when it is active at `now`; otherwise nil and what to answer.
local function active(lease_id, now)
  expire(now)
  local lease = load_packed(leases, lease_id)
  if not lease then
    return nil, {'missing'}
  end
  if lease.status ~= 'active' then
    return nil, {lease.status, group_ids(lease)}
  end
  return lease
end

-- A session that was let in is in its group, or gone: the group is not one that is only opened any more, or loses one session.
local function leave_opening(session_id)
  local group_id = redis.call('HGET', admitted, session_id)
  local entry = group_id and load_packed(opening, group_id)
  redis.call('HDEL', admitted, session_id)
  redis.call('ZREM', unseen, session_id)
  if not entry then
    return
  end
  local kept = {}
  for _, id in ipairs(entry.ids) do
    if id ~= session_id then
      kept[#kept + 1] = id
    end
  end
  entry.ids = kept
  if #kept == 0 then
    redis.call('HDEL', opening, group_id)
  else
    redis.call('HSET', opening, group_id, cmsgpack.pack(entry))
  end
end

local function end_opening(group_id)
  local entry = load_packed(opening, group_id)
  if entry then
    for _, id in ipairs(entry.ids) do
      redis.call('HDEL', admitted, id)
      redis.call('ZREM', unseen, id)
    end
    redis.call('HDEL', opening, group_id)
  end
end
