-- KEYS: level. ARGV: the level of the build that asks, the least one that may serve after it.
-- Returns 0, or the level that the store asks for, which the build does not reach.
local least = tonumber(redis.call('GET', KEYS[1]) or '0')
if least > tonumber(ARGV[1]) then
  return least
end
if tonumber(ARGV[2]) > least then
  redis.call('SET', KEYS[1], ARGV[2])
end
return 0
