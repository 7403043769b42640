-- ARGV: info as it was read, info, now or '' for Redis's time. Returns {'ok', snapshot}, {'changed'}, {'frozen', status} or {'missing'}.
local now = status()
if not now then
  return {'missing'}
end
if redis.call('HGET', KEYS[1], 'info') ~= ARGV[1] then
  return {'changed'}
end
if frozen(now) then
  return {'frozen', now}
end
redis.call('HSET', KEYS[1], 'info', ARGV[2], 'updated_at', clock(ARGV[3]))
return {'ok', snapshot()}
