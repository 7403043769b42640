-- A group: {group_id, size, status, place, deliveries, oldest, rows, lease, members = {{id, usable, reward, rows, oldest}}}
-- status: filling, ready, dropped, leased, acked, dead. A ready group that was passed over sits in `stale`.
redis.replicate_commands()

local groups, rounds, members, ready, stale = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local leases, deadlines, ended, dead = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local counts, announced, requests = KEYS[10], KEYS[11], KEYS[12]

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
  if group.status then
    redis.call('HINCRBY', counts, group.status, -1)
  end
  redis.call('HINCRBY', counts, status, 1)
  redis.call('ZREM', stale, ref)
  if status == 'ready' then
    group.place = group.place or redis.call('HINCRBY', counts, 'place', 1)
    redis.call('ZADD', ready, group.place, ref)
  else
    redis.call('ZREM', ready, ref)
  end
  group.status = status
  save_group(ref, group)
end

local function settled(group)
  return group.status == 'leased' or group.status == 'acked' or group.status == 'dead'
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

local function session_ids(group)
  local ids = {}
  for _, member in ipairs(usable_members(group)) do
    ids[#ids + 1] = member.id
  end
  return ids
end

-- Whether the next session of this group id belongs to a new round.
local function full(group, policy)
  if settled(group) then
    return true
  end
  if policy == 'require_all' then
    return #usable_members(group) >= group.size
  end
  return #group.members >= group.size
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
  elseif #group.members < group.size then
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

local function kill(ref, group, reason, now)
  group.reason = reason
  group.died_at = now
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
    group.lease = nil
    group.fate = (status == 'expired' and 'lease expired' or 'given back') .. ' by ' .. lease.consumer
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
