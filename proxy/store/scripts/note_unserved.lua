-- KEYS: state, calls. ARGV: when, the packed note. A later note stays; what is frozen is not touched.
local now = status()
if now and not frozen(now) and tonumber(redis.call('HGET', KEYS[1], 'unserved_at') or 0) <= tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'unserved_at', ARGV[1], 'unserved', ARGV[2])
end
return 1
