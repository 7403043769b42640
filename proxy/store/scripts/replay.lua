-- KEYS: state, calls, index, answering. ARGV: known calls, now or '', process, time of the reply, then call id, digest, entry of each.
-- Returns as begin: {status, accepted, created_at, records the caller does not know}.
local now, created_at = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at'))
if not now then
  return {'missing', 0, '0', {}}
end
local known, calls = tonumber(ARGV[1]), redis.call('LLEN', KEYS[2])
if known > calls then
  return {'missing', 0, created_at, {}}
end
if now ~= 'open' or known ~= calls then
  return {now, 0, created_at, redis.call('LRANGE', KEYS[2], known, -1)}
end
for i = 5, #ARGV, 3 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then
    redis.call('RPUSH', KEYS[2], ARGV[i + 2])
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
  end
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[3])
end
redis.call('HSET', KEYS[1], 'updated_at', clock(ARGV[2]), 'replayed_at', ARGV[4])
return {now, 1, created_at, {}}
