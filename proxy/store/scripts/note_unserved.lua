-- KEYS: state, calls. ARGV: when, the packed note. Never replaces a later note or changes a frozen session.
local now = status()
if now and not frozen(now) and tonumber(redis.call('HGET', KEYS[1], 'unserved_at') or 0) <= tonumber(ARGV[1]) then
  redis.call('HSET', KEYS[1], 'unserved_at', ARGV[1], 'unserved', ARGV[2])
end
return 1
