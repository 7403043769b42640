-- ARGV: lease id, consumer, max groups or -1, max rows or -1, oldest version or -1, deadline, max deliveries, now,
-- how long an ended lease is remembered, what to do with stale groups, until when the claim of a consumer that gets nothing lasts,
-- whether it waits, whether it wants complete sessions only, the weight version or -1, the one policy wanted or '*', the one run wanted
-- or '*', then for each other policy its name, oldest version or -1, and weight version.
-- Returns {'leased', deadline, {reference, group id, deliveries, oldest version, stale, {session ids}, {policies}}, ...}, or {'none', when a
-- group may become ready by itself or ''}
go_on_when_full()
local lease_id, consumer, deadline, now = ARGV[1], ARGV[2], ARGV[6], tonumber(ARGV[8])
local max_deliveries, stale_groups = tonumber(ARGV[7]), ARGV[10]
local versions, oldest = {[''] = tonumber(ARGV[14])}, {[''] = tonumber(ARGV[5])}
for i = 17, #ARGV, 3 do
  oldest[ARGV[i]], versions[ARGV[i]] = tonumber(ARGV[i + 1]), tonumber(ARGV[i + 2])
end

-- The caller's claim.
local me = {name = consumer, since = now, waits = ARGV[12] == '1', until_ = tonumber(ARGV[11])}
me.max_groups, me.max_rows, me.oldest = tonumber(ARGV[3]), tonumber(ARGV[4]), oldest
me.complete_only, me.policy = ARGV[13] == '1', ARGV[15] ~= '*' and ARGV[15] or nil
me.run = ARGV[16] ~= '*' and ARGV[16] or nil

local function is_complete(group)
  for _, member in ipairs(usable_members(group)) do
    if not member.complete then
      return false
    end
  end
  return true
end

-- The parts of the group that the claim wants, or nil.
local function wanted_of(claim, group)
  local parts = parts_of(group)
  if (claim.complete_only and not is_complete(group)) or (claim.run and claim.run ~= group.run) then
    return nil
  end
  if not claim.policy then
    return parts
  end
  return parts[claim.policy] and {[claim.policy] = parts[claim.policy]}
end

-- Whether a part's policy appeared after the caller listed the policies: its version, and so its age, is unknown.
local function unknown(parts)
  for policy in pairs(parts) do
    if not versions[policy] then
      return true
    end
  end
  return false
end

local function too_old(claim, parts)
  for policy, part in pairs(parts) do
    if part.oldest < (claim.oldest[policy] or -1) then
      return true
    end
  end
  return false
end

local function rows_of(parts)
  local rows = 0
  for _, part in pairs(parts) do
    rows = rows + part.rows
  end
  return rows
end

local function oldest_of(parts)
  local least
  for _, part in pairs(parts) do
    least = math.min(least or part.oldest, part.oldest)
  end
  return least
end

local function newest_of(parts)
  local most = -1
  for _, part in pairs(parts) do
    most = math.max(most, part.oldest)
  end
  return most
end

local function forget_ended()
  local old = redis.call('ZRANGEBYSCORE', ended, '-inf', now - tonumber(ARGV[9]), 'LIMIT', 0, 100)
  for _, id in ipairs(old) do
    redis.call('HDEL', leases, id)
    redis.call('ZREM', ended, id)
  end
end

local function revive_stale()
  local from = math.huge
  for policy, version in pairs(oldest) do
    from = (not me.policy or me.policy == policy) and math.min(from, version) or from
  end
  for _, ref in ipairs(redis.call('ZRANGEBYSCORE', stale, stale_groups == 'flag' and '-inf' or from, '+inf')) do
    local group = load_packed(groups, ref)
    local parts = wanted_of(me, group)
    if parts and (stale_groups == 'flag' or not too_old(me, parts)) then
      redis.call('ZREM', stale, ref)
      redis.call('ZADD', ready, group.place, ref)
    end
  end
end

-- All claims, the longest waiting first, with counters of what each is dealt here.
local function list_claims()
  local all, stored = {me}, redis.call('HGETALL', claims)
  for i = 1, #stored, 2 do
    local claim = cmsgpack.unpack(stored[i + 1])
    if claim.until_ < now or type(claim.oldest) ~= 'table' then
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

local function is_filled(claim, rows)
  if claim.max_groups >= 0 and claim.groups >= claim.max_groups then
    return true
  end
  return claim.max_rows >= 0 and claim.groups > 0 and claim.rows + rows > claim.max_rows
end

-- Claims on different policies or runs do not compete.
local function is_rival(claim)
  local same_policy = not claim.policy or not me.policy or claim.policy == me.policy
  return same_policy and (not claim.run or not me.run or claim.run == me.run)
end

-- The claim that gets this group: of those that can take it the one with the fewest groups, then the longest waiting.
local function deal(group, all)
  local best, its
  for _, claim in ipairs(all) do
    local parts = is_rival(claim) and wanted_of(claim, group)
    if parts then
      claim.full = claim.full or is_filled(claim, rows_of(parts))
      local fresh = stale_groups == 'flag' or not too_old(claim, parts)
      if not claim.full and fresh and (not best or claim.groups < best.groups) then
        best, its = claim, parts
      end
    end
  end
  if best then
    best.groups, best.rows = best.groups + 1, best.rows + rows_of(its)
  end
  return best
end

-- Whether the group left the ready queue. One that has other rows than the stale ones stays for consumers of those.
local function pass_over(ref, group, parts)
  if stale_groups == 'drop' then
    ref, group = own_group(ref, group, parts)
    tally('stale_dropped')
    move(ref, group, 'dropped', 'stale')
    return true
  end
  if not group.passed then
    group.passed = true
    save_group(ref, group)
    tally('stale_kept')
  end
  if are_all(parts, group) then
    redis.call('ZREM', ready, ref)
    redis.call('ZADD', stale, newest_of(parts), ref)
    return true
  end
  return false
end

-- Returns the reference of the group taken, or of its part.
local function take(ref, group, parts)
  ref, group = own_group(ref, group, parts)
  group.deliveries = group.deliveries + 1
  group.lease = lease_id
  count_taken(group, versions)
  group.stale = too_old(me, parts)
  if group.stale then
    tally('stale_flagged')
  end
  move(ref, group, 'leased')
  return ref
end

-- Returns the references taken, and when the first claim that kept a group from the caller ends.
local function take_share(all)
  local refs, withheld, spare, until_ = {}, 0, nil, nil
  while true do
    local ref = redis.call('ZRANGE', ready, withheld, withheld)[1]
    local group = ref and load_packed(groups, ref)
    local parts = group and wanted_of(me, group)
    if not group then
      break
    elseif not parts or unknown(parts) then
      withheld = withheld + 1
    elseif group.deliveries >= max_deliveries then
      local times = group.deliveries .. (group.deliveries == 1 and ' time' or ' times')
      kill(ref, group, 'never_acknowledged', 'delivered ' .. times .. ', never acknowledged; at last: ' .. group.fate, now)
    elseif too_old(me, parts) and stale_groups ~= 'flag' then
      withheld = withheld + (pass_over(ref, group, parts) and 0 or 1)
    else
      local claim = deal(group, all)
      if claim == me then
        refs[#refs + 1] = take(ref, group, parts)
      elseif me.full then
        break
      else
        withheld = withheld + 1
        spare = spare or (not claim.waits and ref)
        until_ = math.min(until_ or claim.until_, claim.until_)
      end
    end
  end
  -- A consumer that does not wait never keeps others from the last group.
  if #refs == 0 and spare then
    local group = load_packed(groups, spare)
    refs[1] = take(spare, group, wanted_of(me, group))
  end
  return refs, until_
end

local function answer(lease)
  local given = {'leased', lease.deadline}
  for _, ref in ipairs(lease.refs) do
    local group = load_packed(groups, ref)
    local ids, names = session_ids(usable_members(group)), {}
    for policy in pairs(parts_of(group)) do
      names[#names + 1] = policy
    end
    local oldest_version = oldest_of(parts_of(group))
    given[#given + 1] = {ref, group.group_id, group.deliveries, oldest_version, group.stale and 1 or 0, ids, names}
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

local repeated = load_packed(leases, lease_id)
if repeated then
  return answer(repeated) -- a repeated request, whose first answer was lost
end
see_versions(versions)
expire(now)
forget_ended()
revive_stale()
local refs, until_ = take_share(list_claims())
if #refs == 0 then
  return claim_and_leave(until_)
end
redis.call('HDEL', claims, consumer)
local lease = {refs = refs, consumer = consumer, status = 'active', deadline = deadline}
redis.call('HSET', leases, lease_id, cmsgpack.pack(lease))
redis.call('ZADD', deadlines, deadline, lease_id)
return answer(lease)
