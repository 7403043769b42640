-- After _ahead. Ends leases and returns their groups; tracks sessions admitted before their group has a member.
local function kill(ref, group, cause, reason, now)
  group.reason, group.lease, group.stale = reason, nil, nil
  redis.call('ZADD', dead, now, ref)
  move(ref, group, 'dead', cause)
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

-- The lease if it is active at `now`, otherwise nil and the script's answer.
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

-- An admitted session has joined its group or is gone: the opening group loses it, and ends without sessions.
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
