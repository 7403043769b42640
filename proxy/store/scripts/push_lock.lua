-- KEYS: lock, fence. ARGV: owner, milliseconds, the fence it was given before or 0. Its fence, or 0 when the lock is not to be had
redis.replicate_commands()
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
local last, fence = tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(ARGV[3])
if fence == 0 then
  -- Not below the clock: a failover that loses the last fence must not give it out again.
  local now = redis.call('TIME')
  fence = math.max(last + 1, now[1] * 1000000 + now[2])
  redis.call('SET', KEYS[2], string.format('%.0f', fence))
elseif fence ~= last then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence
