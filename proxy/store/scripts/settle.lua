-- ARGV: lease id, acked or nacked, now, whether it was never received. Returns {status of the lease, group ids} or {'missing'}.
go_on_when_full()
local lease_id, status, now = ARGV[1], ARGV[2], tonumber(ARGV[3])
local lease, otherwise = active(lease_id, now)
if not lease then
  if otherwise[1] == status then
    -- A write for WAIT to wait for.
    redis.call('HSET', leases, lease_id, redis.call('HGET', leases, lease_id))
  end
  return otherwise
end
local ids = group_ids(lease)
if status == 'nacked' then
  put_back(lease_id, lease, status, now)
  for _, ref in ipairs(ARGV[4] == '1' and lease.refs or {}) do
    local group = load_packed(groups, ref)
    group.deliveries = group.deliveries - 1
    save_group(ref, group)
  end
  return {status, ids}
end
for _, ref in ipairs(lease.refs) do
  finish(ref, load_packed(groups, ref), 'acked')
end
end_lease(lease_id, lease, status, now)
return {status, ids}
