-- KEYS: projects. ARGV: name, the project as it was read, the project. Returns 1, or 0 when it was changed or removed meanwhile.
local found = redis.call('HGET', KEYS[1], ARGV[1])
if found ~= ARGV[2] and found ~= ARGV[3] then
  return 0
end
redis.call('HSET', KEYS[1], ARGV[1], ARGV[3])
return 1
