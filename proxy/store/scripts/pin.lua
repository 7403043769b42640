-- KEYS: state and forks of the origin. ARGV: its created_at, the fork's id, now. Returns 1, or 0 when the origin is gone or being deleted.
local created_at, deleting = unpack(redis.call('HMGET', KEYS[1], 'created_at', 'deleting'))
if created_at ~= ARGV[1] or deleting then
  return 0
end
redis.call('ZADD', KEYS[2], ARGV[3], ARGV[2])
return 1
