-- KEYS: lock. ARGV: owner, milliseconds. 1 when it is the owner's.
redis.replicate_commands()
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
