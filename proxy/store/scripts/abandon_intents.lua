-- KEYS: state, calls, intents. ARGV: call id, the intent without its process. Returns 1 if it still existed.
go_on_when_full()
if redis.call('HEXISTS', KEYS[3], ARGV[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[3], ARGV[1], ARGV[2])
return 1
