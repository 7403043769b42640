-- KEYS: state, calls, intents. ARGV: call id, now or ''. A refused call is activity too: the session is not idle.
redis.call('HDEL', KEYS[3], ARGV[1])
local now = status()
if now and not frozen(now) then
  redis.call('HSET', KEYS[1], 'updated_at', clock(ARGV[2]))
end
return 1
