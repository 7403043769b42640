-- KEYS: state, calls, index, answering. ARGV: the session's created_at or '', known calls, now or '', process, time of the reply, then call id,
-- digest, entry of each. Returns as begin: {status, accepted, records the caller does not know}.
local now, created_at = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at'))
local known, calls = tonumber(ARGV[2]), redis.call('LLEN', KEYS[2])
if not now or is_another(created_at, ARGV[1]) or known > calls then
  return {'missing', 0, {}}
end
if now ~= 'open' or known ~= calls then
  return {now, 0, redis.call('LRANGE', KEYS[2], known, -1)}
end
for i = 6, #ARGV, 3 do
  if redis.call('HEXISTS', KEYS[3], ARGV[i]) == 0 then
    redis.call('RPUSH', KEYS[2], ARGV[i + 2])
    redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
  end
  redis.call('HSET', KEYS[4], ARGV[i], ARGV[4])
end
redis.call('HSET', KEYS[1], 'updated_at', clock(ARGV[3]), 'replayed_at', ARGV[5])
return {now, 1, {}}
