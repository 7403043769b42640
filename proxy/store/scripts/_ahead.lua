-- After _parts. Predicts how many versions behind a group will be when it is leased, per policy.

-- Fields of `counts`: version_seen is the newest version of a policy that a lease or an admission has seen, taken the number of
-- groups leased under it.
local function of_policy(name, policy)
  return policy == '' and name or name .. ':' .. policy
end

local function version_seen(policy)
  return tonumber(redis.call('HGET', counts, of_policy('version_seen', policy)) or '-1')
end

local function see_versions(versions)
  for policy, version in pairs(versions) do
    if version > version_seen(policy) then
      redis.call('HSET', counts, of_policy('version_seen', policy), version, of_policy('taken', policy), 0)
    end
  end
end

local function count_taken(group, versions)
  group.leased_at = {}
  for policy in pairs(parts_of(group)) do
    local version = versions[policy] or -1
    group.leased_at[policy] = version
    if version >= 0 and version == version_seen(policy) then
      redis.call('HINCRBY', counts, of_policy('taken', policy), 1)
    end
  end
end

-- The group was given back: it counts no longer under the versions it was leased under.
local function uncount_taken(group)
  local leased_at = type(group.leased_at) == 'number' and {[''] = group.leased_at} or group.leased_at or {}
  for policy, version in pairs(leased_at) do
    if version >= 0 and version == version_seen(policy) then
      redis.call('HINCRBY', counts, of_policy('taken', policy), -1)
    end
  end
  group.leased_at = nil
end

local function count_with(refs, policy)
  local number = 0
  for _, ref in ipairs(refs) do
    local group = load_packed(groups, ref)
    number = number + (group and parts_of(group)[policy] and 1 or 0)
  end
  return number
end

-- Leased groups with rows of the policy.
local function leased_now(policy)
  if redis.call('SCARD', policies) == 0 then
    return tonumber(redis.call('HGET', counts, 'leased') or '0')
  end
  local number = 0
  for _, lease_id in ipairs(redis.call('ZRANGE', deadlines, 0, -1)) do
    number = number + count_with(load_packed(leases, lease_id).refs, policy)
  end
  return number
end

-- Leased groups that are not in the weights of `version` yet. The maximum of both counts: a trainer that acknowledges before it
-- publishes has none leased meanwhile; one that fetches ahead has more leased than it took under this version.
local function in_training(policy, version)
  local taken = redis.call('HGET', counts, of_policy('taken', policy))
  local of_this = version >= 0 and version == version_seen(policy) and tonumber(taken) or 0
  return math.max(of_this, leased_now(policy))
end

-- Groups opened, filling or ready; with a policy, without ready ones that have no rows of it. What incomplete groups will have is
-- unknown, so they count.
local function undelivered(policy)
  local begun = redis.call('HLEN', opening) + tonumber(redis.call('HGET', counts, 'filling') or '0')
  if not policy or redis.call('SCARD', policies) == 0 then
    return begun + redis.call('ZCARD', ready)
  end
  return begun + count_with(redis.call('ZRANGE', ready, 0, -1), policy)
end

-- How many versions will have come when a group begun now is leased, if groups are taken in order: the maximum over the policies.
local function versions_ahead(versions, groups_per_version)
  local furthest = 0
  for policy, version in pairs(versions) do
    local ahead = math.floor((undelivered(policy) + in_training(policy, version)) / groups_per_version)
    furthest = math.max(furthest, ahead)
  end
  return furthest
end

-- The default policy's version, and those of others from ARGV[first] on: policy, version.
local function versions_from(version, first)
  local versions = {[''] = tonumber(version)}
  for i = first, #ARGV, 2 do
    versions[ARGV[i]] = tonumber(ARGV[i + 1])
  end
  return versions
end
