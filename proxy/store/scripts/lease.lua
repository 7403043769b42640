-- ARGV: lease id, consumer, max groups or -1, max rows or -1, oldest version or -1, deadline, max deliveries, now,
-- how long an ended lease is remembered, what becomes of stale groups, until when the claim of who gets nothing lives,
-- whether it waits, the weight version or -1.
-- {'leased', deadline, {reference, group id, deliveries, oldest version, stale, {session ids}}, ...}, or {'none', when
-- something may be there by itself or ''}
local lease_id, consumer, deadline, now = ARGV[1], ARGV[2], ARGV[6], tonumber(ARGV[8])
local version = tonumber(ARGV[13])
local oldest, max_deliveries, stale_groups = tonumber(ARGV[5]), tonumber(ARGV[7]), ARGV[10]

-- Who else wants groups, and the asker, in the order in which they began to want; with what each is dealt here.
local me = {name = consumer, since = now, waits = ARGV[12] == '1', until_ = tonumber(ARGV[11])}
me.max_groups, me.max_rows, me.oldest = tonumber(ARGV[3]), tonumber(ARGV[4]), oldest

local function forget_ended()
  local old = redis.call('ZRANGEBYSCORE', ended, '-inf', now - tonumber(ARGV[9]), 'LIMIT', 0, 100)
  for _, id in ipairs(old) do
    redis.call('HDEL', leases, id)
    redis.call('ZREM', ended, id)
  end
end

local function revive_stale()
  local from = stale_groups == 'flag' and '-inf' or oldest
  for _, ref in ipairs(redis.call('ZRANGEBYSCORE', stale, from, '+inf')) do
    redis.call('ZREM', stale, ref)
    redis.call('ZADD', ready, load_packed(groups, ref).place, ref)
  end
end

local function wanting()
  local all, stored = {me}, redis.call('HGETALL', claims)
  for i = 1, #stored, 2 do
    local claim = cmsgpack.unpack(stored[i + 1])
    if claim.until_ < now then
      redis.call('HDEL', claims, stored[i])
    elseif stored[i] == consumer then
      me.since = claim.since
    else
      all[#all + 1] = claim
    end
  end
  table.sort(all, function(a, b)
    if a.since ~= b.since then
      return a.since < b.since
    end
    return a.name < b.name
  end)
  for _, claim in ipairs(all) do
    claim.groups, claim.rows = 0, 0
  end
  return all
end

local function filled_by(claim, group)
  if claim.max_groups >= 0 and claim.groups >= claim.max_groups then
    return true
  end
  return claim.max_rows >= 0 and claim.groups > 0 and claim.rows + group.rows > claim.max_rows
end

-- The claim this group falls to: of those that can take it, the one with the fewest so far, the oldest of several.
local function deal(group, all)
  local best
  for _, claim in ipairs(all) do
    claim.full = claim.full or filled_by(claim, group)
    local new_enough = stale_groups == 'flag' or group.oldest >= claim.oldest
    if not claim.full and new_enough and (not best or claim.groups < best.groups) then
      best = claim
    end
  end
  if best then
    best.groups, best.rows = best.groups + 1, best.rows + group.rows
  end
  return best
end

local function pass_over(ref, group)
  if stale_groups == 'drop' then
    tally('stale_dropped')
    move(ref, group, 'dropped')
    return
  end
  if not group.passed then
    group.passed = true
    save_group(ref, group)
    tally('stale_kept')
  end
  redis.call('ZREM', ready, ref)
  redis.call('ZADD', stale, group.oldest, ref)
end

local function take(ref, group)
  group.deliveries = group.deliveries + 1
  group.lease = lease_id
  count_taken(group, version)
  group.stale = group.oldest < oldest
  if group.stale then
    tally('stale_flagged')
  end
  move(ref, group, 'leased')
end

-- The references taken, and when the first claim that was respected ends.
local function take_share(all)
  local refs, withheld, spare, until_ = {}, 0, nil, nil
  while true do
    local ref = redis.call('ZRANGE', ready, withheld, withheld)[1]
    local group = ref and load_packed(groups, ref)
    if not group then
      break
    elseif group.deliveries >= max_deliveries then
      local times = group.deliveries .. (group.deliveries == 1 and ' time' or ' times')
      kill(ref, group, 'delivered ' .. times .. ', never acknowledged; at last: ' .. group.fate, now)
    elseif group.oldest < oldest and stale_groups ~= 'flag' then
      pass_over(ref, group)
    else
      local claim = deal(group, all)
      if claim == me then
        take(ref, group)
        refs[#refs + 1] = ref
      elseif me.full then
        break
      else
        withheld = withheld + 1
        spare = spare or (not claim.waits and ref)
        until_ = math.min(until_ or claim.until_, claim.until_)
      end
    end
  end
  -- Somebody who only looked in now and then keeps nobody from the last group.
  if #refs == 0 and spare then
    take(spare, load_packed(groups, spare))
    refs[1] = spare
  end
  return refs, until_
end

local function answer(lease)
  local given = {'leased', lease.deadline}
  for _, ref in ipairs(lease.refs) do
    local group = load_packed(groups, ref)
    local ids = session_ids(usable_members(group))
    given[#given + 1] = {ref, group.group_id, group.deliveries, group.oldest, group.stale and 1 or 0, ids}
  end
  return given
end

local function claim_and_leave(until_)
  redis.call('HSET', claims, consumer, cmsgpack.pack(me))
  local due = redis.call('ZRANGE', deadlines, 0, 0, 'WITHSCORES')[2]
  if until_ and (not due or until_ < tonumber(due)) then
    due = string.format('%.6f', until_)
  end
  return {'none', due or ''}
end

local held = load_packed(leases, lease_id)
if held then
  return answer(held) -- the same request, sent again after its answer was lost
end
see_version(version)
expire(now)
forget_ended()
revive_stale()
local refs, until_ = take_share(wanting())
if #refs == 0 then
  return claim_and_leave(until_)
end
redis.call('HDEL', claims, consumer)
local lease = {refs = refs, consumer = consumer, status = 'active', deadline = deadline}
redis.call('HSET', leases, lease_id, cmsgpack.pack(lease))
redis.call('ZADD', deadlines, deadline, lease_id)
return answer(lease)
