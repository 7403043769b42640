-- KEYS: current, history. ARGV: version, state, how many to keep. {1}, or {0, current version}
redis.replicate_commands()
local current = redis.call('GET', KEYS[1])
local version = current and cmsgpack.unpack(current)[2].version or 0
if tonumber(ARGV[1]) <= version then
  return {0, version}
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('LPUSH', KEYS[2], ARGV[2])
redis.call('LTRIM', KEYS[2], 0, tonumber(ARGV[3]) - 1)
return {1}
