-- ARGV: lease id, consumer, max groups or -1, max rows or -1, oldest version or -1, deadline, max deliveries, now,
-- how long an ended lease is remembered. {deadline, {group id, deliveries, oldest version, {session ids}}, ...} or {}
local lease_id, consumer, deadline, now = ARGV[1], ARGV[2], ARGV[6], tonumber(ARGV[8])
local max_groups, max_rows, oldest = tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])

local function forget_ended()
  local old = redis.call('ZRANGEBYSCORE', ended, '-inf', now - tonumber(ARGV[9]), 'LIMIT', 0, 100)
  for _, id in ipairs(old) do
    redis.call('HDEL', leases, id)
    redis.call('ZREM', ended, id)
  end
end

local function revive_stale()
  for _, ref in ipairs(redis.call('ZRANGEBYSCORE', stale, oldest, '+inf')) do
    redis.call('ZREM', stale, ref)
    redis.call('ZADD', ready, load_packed(groups, ref).place, ref)
  end
end

local function answer(lease)
  local given = {lease.deadline}
  for _, ref in ipairs(lease.refs) do
    local group = load_packed(groups, ref)
    given[#given + 1] = {group.group_id, group.deliveries, group.oldest, session_ids(group)}
  end
  return given
end

local function take()
  local refs, rows = {}, 0
  while max_groups < 0 or #refs < max_groups do
    local ref = redis.call('ZRANGE', ready, 0, 0)[1]
    if not ref then
      break
    end
    local group = load_packed(groups, ref)
    if group.deliveries >= tonumber(ARGV[7]) then
      kill(ref, group, 'delivered ' .. group.deliveries .. ' times, never acknowledged; at last: ' .. group.fate, now)
    elseif group.oldest < oldest then
      redis.call('ZREM', ready, ref)
      redis.call('ZADD', stale, group.oldest, ref)
    elseif max_rows >= 0 and #refs > 0 and rows + group.rows > max_rows then
      break
    else
      group.deliveries = group.deliveries + 1
      group.lease = lease_id
      move(ref, group, 'leased')
      refs[#refs + 1] = ref
      rows = rows + group.rows
    end
  end
  return refs
end

local held = load_packed(leases, lease_id)
if held then
  return answer(held) -- the same request, sent again after its answer was lost
end
expire(now)
forget_ended()
revive_stale()
local refs = take()
if #refs == 0 then
  return {}
end
local lease = {refs = refs, consumer = consumer, status = 'active', deadline = deadline}
redis.call('HSET', leases, lease_id, cmsgpack.pack(lease))
redis.call('ZADD', deadlines, deadline, lease_id)
return answer(lease)
