-- ARGV: lease id, reference, reason, now
go_on_when_full()
local lease_id, now = ARGV[1], tonumber(ARGV[4])
local lease = active(lease_id, now)
if not lease then
  return 0
end
local kept = {}
for _, ref in ipairs(lease.refs) do
  if ref == ARGV[2] then
    local group = load_packed(groups, ref)
    uncount_taken(group)
    kill(ref, group, 'undeliverable', ARGV[3], now)
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
