-- KEYS: due, jobs, taken, asked. ARGV: name, job (packed), whether it replaces the one there is. A job that is worked at is due again when
-- it is settled.
redis.replicate_commands()
redis.call('HDEL', KEYS[3], '') -- a full Redis refuses a script's first write alone, and never this one
local now = redis.call('TIME')
local time = now[1] .. '.' .. string.format('%06d', now[2])
if ARGV[3] == '1' or redis.call('HEXISTS', KEYS[2], ARGV[1]) == 0 then
  redis.call('HSET', KEYS[2], ARGV[1], ARGV[2])
end
redis.call('HINCRBY', KEYS[4], ARGV[1], 1)
redis.call('ZADD', KEYS[1], 'NX', time, ARGV[1])
return 1
