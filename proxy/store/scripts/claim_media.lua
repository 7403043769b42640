-- KEYS: state, media. ARGV: created_at, then digest and bytes of each image.
-- Returns 1, or 0 when the session takes no more records.
local now, created_at = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at'))
if (now ~= 'open' and now ~= 'closing' and now ~= 'restoring') or created_at ~= ARGV[1] then
  return 0
end
for i = 2, #ARGV, 2 do
  if redis.call('HSETNX', KEYS[2], ARGV[i], ARGV[i + 1]) == 1 then
    redis.call('HINCRBY', KEYS[1], 'bytes', ARGV[i + 1])
  end
end
return 1
