-- After _delivery. Counts a group's rows per policy, and splits one policy's part off it.
local function add_rows(group, policy, rows, oldest)
  if (group.given and group.given[policy]) or (group.of and group.of ~= policy) then
    return
  end
  local part = group.parts[policy] or {rows = 0, oldest = oldest}
  part.rows, part.oldest = part.rows + rows, math.min(part.oldest, oldest)
  group.parts[policy] = part
end

local function measure(group)
  group.parts = {}
  for _, member in ipairs(usable_members(group)) do
    if member.rows > 0 or not member.named then
      add_rows(group, '', member.rows, member.oldest)
    end
    for policy, part in pairs(member.named or {}) do
      add_rows(group, policy, part.rows, part.oldest)
    end
  end
end

-- A group stored by a build without parts has only the default policy's rows.
local function parts_of(group)
  return group.parts or {[''] = {rows = group.rows or 0, oldest = group.oldest or 0}}
end

-- The reference of a part that is a separate group; no policy's name contains '='.
local function part_ref(ref, policy)
  local round, group_id = string.match(ref, '^(%d+):(.*)$')
  return round .. '/' .. policy .. '=' .. group_id
end

local function are_all(wanted, group)
  for policy in pairs(parts_of(group)) do
    if not wanted[policy] then
      return false
    end
  end
  return true
end

-- The group itself if `wanted` are all its parts, otherwise a new group of the one wanted policy, split off it.
local function own_group(ref, group, wanted)
  if are_all(wanted, group) then
    return ref, group
  end
  local policy, part = next(wanted), {}
  for name, value in pairs(group) do
    part[name] = value
  end
  part.of, part.given, part.status, part.parts = policy, nil, nil, {[policy] = wanted[policy]}
  group.given = group.given or {}
  group.given[policy], group.parts[policy] = true, nil
  save_group(ref, group)
  return part_ref(ref, policy), part
end

-- References of a group and of the parts split off it.
local function with_parts(ref, group)
  local refs = {}
  for policy in pairs(group and group.given or {}) do
    refs[#refs + 1] = part_ref(ref, policy)
  end
  table.sort(refs)
  table.insert(refs, 1, ref)
  return refs
end
