-- ARGV: session id, now, request or ''
go_on_when_full()
redis.call('ZADD', announced, ARGV[2], ARGV[1])
if ARGV[3] == '' then
  redis.call('HDEL', requests, ARGV[1])
else
  redis.call('HSET', requests, ARGV[1], ARGV[3])
end
return 1
