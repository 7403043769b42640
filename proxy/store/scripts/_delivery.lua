-- A group: {group_id, run, size, status, place, deliveries, lease, since, rule, members = {{id, usable, reward, rows, oldest, complete,
-- named}}, parts}
-- status: filling, ready, dropped, leased, acked, dead. A ready group that was passed over sits in `stale`.
-- `since`: when its last member came. `given_up`: it waits for no more members. `stale`: its lease wanted newer rows. `leased_at`:
-- each policy's weight version when it was leased. `passed`: it was counted as stale before. `final`: it never changes again, and
-- `left` is how many of its sessions are not deleted.
-- Rows belong to policies; '' is the default. A member's `rows` and `oldest` are the default policy's, named[policy] = {rows, oldest}
-- another one's; parts[policy] = {rows, oldest} is what the group offers. A lease of one policy splits its part off a group that has
-- several: `given` holds the policies split off, and the part is a separate group, `of` that policy.
-- `judged`: what the group has added to the numbers of its run. `counted`: the run that it is counted in, `(other)` beyond the most that
-- there may be. `cause`: the word for why it was dropped or died.
redis.replicate_commands()

local groups, rounds, members, ready, stale = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local leases, deadlines, ended, dead = KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local counts, announced, requests = KEYS[10], KEYS[11], KEYS[12]
local filling, claims, opening, admitted = KEYS[13], KEYS[14], KEYS[15], KEYS[16]
local totals, arrivals, unseen, policies = KEYS[17], KEYS[18], KEYS[19], KEYS[20]
local outcomes, cells, curves, runs, run_groups = KEYS[21], KEYS[22], KEYS[23], KEYS[24], KEYS[25]

local MOST_RUNS = 200
local OTHER = '(other)'

-- For scripts that end or lease something, since only that makes room: a full Redis checks memory at a script's first write alone, and
-- never refuses this one, an HDEL that changes nothing.
local function go_on_when_full()
  redis.call('HDEL', requests, '')
end

local function tally(what)
  redis.call('HINCRBY', totals, what, 1)
end

local woken = false

-- Wakes waiting consumers, once per script. The stream keeps only its last entry.
local function wake_consumers()
  if not woken then
    woken = true
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

-- The run under whose name a run is counted: itself, until there are too many.
local function counted_run(run, now)
  if redis.call('HEXISTS', runs, run) == 0 then
    run = redis.call('HLEN', runs) < MOST_RUNS and run or OTHER
    if redis.call('HEXISTS', runs, run) == 0 then
      redis.call('HSET', runs, run, cmsgpack.pack({since = now, at = now, curves = 0}))
    end
  end
  return run
end

-- Counts the group in its state, or no longer with `by` -1.
local function count_state(group, by)
  redis.call('HINCRBY', counts, group.status, by)
  local field = (group.counted or OTHER) .. '=' .. group.status .. '=' .. (group.cause or '')
  if redis.call('HINCRBY', run_groups, field, by) == 0 then
    redis.call('HDEL', run_groups, field)
  end
end

-- Moves a group to `status` for `cause`, and updates counts and queues.
local function move(ref, group, status, cause)
  if group.status ~= status then
    if group.status then
      count_state(group, -1)
    end
    group.status, group.cause = status, cause
    count_state(group, 1)
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
    wake_consumers()
  else
    redis.call('ZREM', ready, ref)
  end
  group.status = status
  save_group(ref, group)
end

local function is_settled(group)
  return group.status == 'leased' or group.status == 'acked' or group.status == 'dead' or group.final or group.given
end

-- The group never changes again. Its sessions remain known as its members until each is deleted.
local function finish(ref, group, status, cause)
  for _, member in ipairs(group.members) do
    redis.call('HDEL', outcomes, member.id)
  end
  group.left, group.final = #group.members, true
  group.members, group.lease, group.fate = {}, nil, nil
  move(ref, group, status, cause)
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

-- What the group needs of its members: its own rule first, then the service's default.
local function apply_rule(group, needs, minimum, zero_variance)
  local own = group.rule or {}
  return own.policy or needs, own.minimum or minimum, own.zero_variance or zero_variance
end

-- Whether the next session of this group id starts a new round.
local function is_full(group, needs)
  if is_settled(group) or group.given_up then
    return true
  end
  if apply_rule(group, needs) == 'require_all' then
    return #usable_members(group) >= group.size
  end
  return #group.members >= group.size
end

-- The round that a new session of this group id joins, and its group if it exists.
local function newcomers_round(group_id, needs)
  local round = tonumber(redis.call('HGET', rounds, group_id) or '1')
  local group = load_packed(groups, round .. ':' .. group_id)
  while group and is_full(group, needs) do
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

-- The status, and the cause of 'dropped'. A function of the members and the rule alone, so that a corrected reward changes the outcome.
local function decide(group, needs, minimum, zero_variance)
  needs, minimum, zero_variance = apply_rule(group, needs, minimum, zero_variance)
  local usable = usable_members(group)
  if needs == 'drop' and #usable < #group.members then
    return 'dropped', 'too_few_usable'
  end
  if needs == 'require_all' then
    if #usable < group.size then
      return 'filling'
    end
  elseif #group.members < group.size and not group.given_up then
    return 'filling'
  elseif #usable < math.max(minimum, 1) then
    return 'dropped', 'too_few_usable'
  end
  if zero_variance == 'drop' and group.size > 1 and same_rewards(usable) then
    return 'dropped', 'equal_rewards'
  end
  return 'ready'
end
