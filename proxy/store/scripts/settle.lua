-- ARGV: lease id, acked or nacked, now. {status of the lease, group ids} or {'missing'}
local lease_id, status, now = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease, otherwise = active(lease_id, now)
if not lease then
  return otherwise
end
local ids = group_ids(lease)
if status == 'nacked' then
  put_back(lease_id, lease, status, now)
  return {status, ids}
end
for _, ref in ipairs(lease.refs) do
  local group = load_packed(groups, ref)
  -- An acknowledged group is never looked into again, only counted.
  group.members, group.lease, group.fate = {}, nil, nil
  move(ref, group, 'acked')
end
end_lease(lease_id, lease, status, now)
return {status, ids}
