-- ARGV: lease id, group id, reason, now
local lease_id, now = ARGV[1], tonumber(ARGV[4])
local lease = active(lease_id, now)
if not lease then
  return 0
end
local kept = {}
for _, ref in ipairs(lease.refs) do
  local group = load_packed(groups, ref)
  if group.group_id == ARGV[2] then
    group.lease = nil
    kill(ref, group, ARGV[3], now)
  else
    kept[#kept + 1] = ref
  end
end
lease.refs = kept
if #kept == 0 then
  end_lease(lease_id, lease, 'nacked', now)
else
  redis.call('HSET', leases, lease_id, cmsgpack.pack(lease))
end
return 1
