-- ARGV: session ids. What keeps each of them: announced, its group's status, or 'none'.
local found = {}
for i, session_id in ipairs(ARGV) do
  local ref = redis.call('HGET', members, session_id)
  local group = ref and load_packed(groups, ref)
  if redis.call('ZSCORE', announced, session_id) then
    found[i] = 'announced'
  else
    found[i] = group and group.status or 'none'
  end
end
return found
