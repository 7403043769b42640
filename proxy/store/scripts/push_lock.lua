-- KEYS: lock, fence. ARGV: owner, milliseconds, the fence it was given before or 0. Returns its fence, or 0 if another has the lock.
redis.replicate_commands()
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
local last, fence = tonumber(redis.call('GET', KEYS[2]) or 0), tonumber(ARGV[3])
if fence == 0 then
  -- Never below the clock, so that a failover that loses the last fence does not give it out again.
  local now = redis.call('TIME')
  fence = math.max(last + 1, now[1] * 1000000 + now[2])
  redis.call('SET', KEYS[2], string.format('%.0f', fence))
elseif fence ~= last then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return fence
