-- ARGV: lease id, new deadline, now. Returns {'active', deadline}, {other status} or {'missing'}
go_on_when_full()
local lease, otherwise = active(ARGV[1], tonumber(ARGV[3]))
if not lease then
  return otherwise
end
lease.deadline = ARGV[2]
redis.call('HSET', leases, ARGV[1], cmsgpack.pack(lease))
redis.call('ZADD', deadlines, ARGV[2], ARGV[1])
return {'active', lease.deadline}
