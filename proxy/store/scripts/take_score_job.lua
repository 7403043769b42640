-- KEYS: due, jobs, taken, asked. ARGV: seconds. Returns {job, number, asked, how many seconds ago it was first taken, how many times in a row
-- nobody put it off or settled it before its time was over}, or nothing.
redis.replicate_commands()
local now = redis.call('TIME')
local time = now[1] .. '.' .. string.format('%06d', now[2])
local found = redis.call('ZRANGEBYSCORE', KEYS[1], '-inf', time, 'LIMIT', 0, 1)
if #found == 0 then
  return false
end
local name = found[1]
local job = redis.call('HGET', KEYS[2], name)
redis.call('ZADD', KEYS[1], string.format('%.6f', tonumber(time) + tonumber(ARGV[1])), name)
local number = redis.call('HINCRBY', KEYS[3], name, 1)
redis.call('HSETNX', KEYS[3], 'since:' .. name, time)
local age = string.format('%.6f', tonumber(time) - tonumber(redis.call('HGET', KEYS[3], 'since:' .. name)))
local lost = 0
if redis.call('HSETNX', KEYS[3], 'held:' .. name, 0) == 0 then
  lost = redis.call('HINCRBY', KEYS[3], 'held:' .. name, 1)
end
return {job, number, redis.call('HGET', KEYS[4], name) or 0, age, lost}
