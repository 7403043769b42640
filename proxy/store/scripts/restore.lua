-- KEYS: state, calls, index. ARGV: info, created_at, number of the first record, then call id, digest, record of each.
-- Returns {'ok', calls}, {'closed', status} when a closed session has them all, {'gap', calls} or {'conflict', reason}.
local now, first = status(), tonumber(ARGV[3])
if now == 'open' or now == 'closing' then
  return {'conflict', 'it is ' .. now}
end
if now == 'restoring' and redis.call('HGET', KEYS[1], 'info') ~= ARGV[1] then
  return {'conflict', 'another import of it has not finished'}
end
if redis.call('LLEN', KEYS[2]) < first then
  return {'gap', redis.call('LLEN', KEYS[2])}
end
local fresh = {}
for i = 4, #ARGV, 3 do
  local digest = redis.call('HGET', KEYS[3], ARGV[i])
  if not digest and (not now or now == 'restoring') then
    fresh[#fresh + 1] = i
  elseif digest ~= ARGV[i + 1] then
    return {'conflict', 'its call ' .. ARGV[i] .. ' differs'}
  end
end
if not now then
  redis.call('HSET', KEYS[1], 'info', ARGV[1], 'status', 'restoring', 'created_at', ARGV[2], 'updated_at', ARGV[2])
end
for _, i in ipairs(fresh) do
  redis.call('RPUSH', KEYS[2], ARGV[i + 2])
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
end
if now and now ~= 'restoring' then
  return {'closed', now}
end
return {'ok', redis.call('LLEN', KEYS[2])}
