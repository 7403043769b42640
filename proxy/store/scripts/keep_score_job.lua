-- KEYS: due, jobs, taken, asked. ARGV: name, number, seconds, '1' if it is put off: nobody works at it meanwhile, '1' if it got on: its age
-- is counted anew.
redis.replicate_commands()
if redis.call('HGET', KEYS[3], ARGV[1]) ~= ARGV[2] then
  return 0
end
if ARGV[4] == '1' then
  redis.call('HDEL', KEYS[3], 'held:' .. ARGV[1])
end
local now = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'XX', string.format('%.6f', now[1] + now[2] / 1e6 + tonumber(ARGV[3])), ARGV[1])
if ARGV[5] == '1' then
  redis.call('HDEL', KEYS[3], 'since:' .. ARGV[1])
end
return 1
