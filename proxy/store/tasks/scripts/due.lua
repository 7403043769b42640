-- ARGV: name of a set, limit, now, until when the members returned are claimed. Returns its due members, the longest due first.
local key = base .. ':' .. ARGV[1]
local due = redis.call('ZRANGEBYSCORE', key, '-inf', ARGV[3], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(due) do
  redis.call('ZADD', key, ARGV[4], member)
end
return due
