-- ARGV: session ids. Returns what holds each: 'announced', its group's status, or 'none'. Of a group split into parts, the status of a
-- part that is still undelivered, if there is one.
local known = {}

local function read_standing(ref)
  local group = load_packed(groups, ref)
  local status = group and group.status or 'none'
  for _, each in ipairs(with_parts(ref, group)) do
    local part = load_packed(groups, each)
    if part and part.status ~= 'acked' and part.status ~= 'dropped' then
      return part.status
    end
  end
  return status
end

local function standing(ref)
  known[ref] = known[ref] or read_standing(ref)
  return known[ref]
end

local found = {}
for i, session_id in ipairs(ARGV) do
  local ref = redis.call('HGET', members, session_id)
  if redis.call('ZSCORE', announced, session_id) then
    found[i] = 'announced'
  else
    found[i] = ref and standing(ref) or 'none'
  end
end
return found
