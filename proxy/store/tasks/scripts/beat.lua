-- ARGV: node, its packed state, now, then task, index and attempt of each rollout it holds. Returns the positions, from 0, of those that it
-- no longer has.
local node, now, FORGOTTEN_SECONDS = ARGV[1], ARGV[3], 3600
redis.call('HSET', nodes, node, ARGV[2])
redis.call('ZADD', seen, now, node)
for _, gone in ipairs(redis.call('ZRANGEBYSCORE', seen, '-inf', now - FORGOTTEN_SECONDS)) do
  redis.call('HDEL', nodes, gone)
  redis.call('HDEL', takes, gone)
  redis.call('HDEL', owners, gone)
  redis.call('ZREM', seen, gone)
end
local lost = {}
for i = 4, #ARGV, 3 do
  local status = status_of(ARGV[i], ARGV[i + 1], ARGV[i + 2], node)
  if status and not ENDED[status] then
    local place = redis.call('HMGET', rollout_key(ARGV[i], ARGV[i + 1]), 'queue', 'entry')
    redis.call('XCLAIM', queue_key(place[1]), GROUP, node, 0, place[2], 'JUSTID')
  else
    lost[#lost + 1] = (i - 4) / 3
  end
end
return lost
