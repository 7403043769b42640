-- ARGV: info, now. 1 when the session is there as asked, 0 when another one has its id.
local info = redis.call('HGET', KEYS[1], 'info')
if info then
  return info == ARGV[1] and 1 or 0
end
redis.call('HSET', KEYS[1], 'info', ARGV[1], 'status', 'open', 'created_at', ARGV[2], 'updated_at', ARGV[2])
return 1
