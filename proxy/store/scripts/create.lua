-- ARGV: info, now. Returns 1 when this session exists now, 0 when another one has its id.
local info = redis.call('HGET', KEYS[1], 'info')
if info then
  return info == ARGV[1] and 1 or 0
end
redis.call('HSET', KEYS[1], 'info', ARGV[1], 'status', 'open', 'created_at', ARGV[2], 'updated_at', ARGV[2])
return 1
