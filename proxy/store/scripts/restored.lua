-- KEYS: state, calls, index, intents, delivered, answering, log. ARGV: info, number of calls, log, then name and value of each field of the state, ''
-- and the ids of the delivered calls, '' and the id and value of each intent. Returns {'ok'}, {'closed'}, {'missing'} or
-- {'conflict', reason}.
local now = status()
if not now then
  return {'missing'}
end
if now ~= 'restoring' then
  return {'closed'}
end
if redis.call('HGET', KEYS[1], 'info') ~= ARGV[1] then
  return {'conflict', 'another import of it has not finished'}
end
if redis.call('LLEN', KEYS[2]) ~= tonumber(ARGV[2]) then
  return {'conflict', 'it has ' .. redis.call('LLEN', KEYS[2]) .. ' calls instead of ' .. ARGV[2]}
end
if ARGV[3] ~= '' then
  redis.call('SET', KEYS[7], ARGV[3])
end
local i = 4
while ARGV[i] ~= '' do
  redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1])
  i = i + 2
end
i = i + 1
while ARGV[i] ~= '' do
  redis.call('SADD', KEYS[5], ARGV[i])
  i = i + 1
end
for at = i + 1, #ARGV, 2 do
  redis.call('HSET', KEYS[4], ARGV[at], ARGV[at + 1])
end
return {'ok'}
