-- KEYS: due, jobs, taken, asked. ARGV: name, number, asked.
redis.replicate_commands()
if redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then
  return 0
end
redis.call('HDEL', KEYS[3], 'since:' .. ARGV[1], 'held:' .. ARGV[1])
if redis.call('HGET', KEYS[4], ARGV[1]) ~= ARGV[3] then
  local now = redis.call('TIME')
  redis.call('ZADD', KEYS[1], now[1] .. '.' .. string.format('%06d', now[2]), ARGV[1])
  return 1
end
redis.call('ZREM', KEYS[1], ARGV[1])
redis.call('HDEL', KEYS[2], ARGV[1])
redis.call('HDEL', KEYS[3], ARGV[1])
redis.call('HDEL', KEYS[4], ARGV[1])
return 1
