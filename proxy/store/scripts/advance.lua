-- KEYS: current, history, fence. ARGV: version, state, how many to keep, fence or 0.
-- Returns {1}, {0, current version}, or {-1} when another owner has had the lock since.
redis.replicate_commands()
local fence = tonumber(ARGV[4])
if fence > 0 and tonumber(redis.call('GET', KEYS[3]) or 0) ~= fence then
  return {-1}
end
local current = redis.call('GET', KEYS[1])
if current == ARGV[2] then
  return {1} -- a repetition
end
local version = current and cmsgpack.unpack(current)[2].version or 0
if tonumber(ARGV[1]) <= version then
  return {0, version}
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('LPUSH', KEYS[2], ARGV[2])
redis.call('LTRIM', KEYS[2], 0, tonumber(ARGV[3]) - 1)
return {1}
