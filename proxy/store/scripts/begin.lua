-- KEYS: state, calls, intents. ARGV: known calls, call id, intent.
-- {status, accepted, created_at, records the caller does not know}
local now = status()
if not now then
  return {'missing', 0, '0', {}}
end
local created_at = redis.call('HGET', KEYS[1], 'created_at')
local known, calls = tonumber(ARGV[1]), redis.call('LLEN', KEYS[2])
if known > calls then
  return {'missing', 0, created_at, {}}
end
if now == 'open' and known == calls then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
  return {now, 1, created_at, {}}
end
return {now, 0, created_at, redis.call('LRANGE', KEYS[2], known, -1)}
