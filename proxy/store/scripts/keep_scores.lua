-- KEYS: state, scores. ARGV: the session's created_at or '', '1' to replace what is there or '', then field and score of each.
-- Returns 'ok', 'missing', or 'leased' where a score would be added or replaced.
local created_at, leased = unpack(redis.call('HMGET', KEYS[1], 'created_at', 'leased'))
if not created_at or is_another(created_at, ARGV[1]) then
  return 'missing'
end
local fresh = {}
for i = 3, #ARGV, 2 do
  local kept = redis.call('HGET', KEYS[2], ARGV[i])
  if not kept or (ARGV[2] == '1' and kept ~= ARGV[i + 1]) then
    fresh[#fresh + 1] = i
  end
end
if #fresh > 0 and leased then
  return 'leased'
end
for _, i in ipairs(fresh) do
  redis.call('HSET', KEYS[2], ARGV[i], ARGV[i + 1])
end
-- A repetition writes too: WAIT waits for the connection's last write.
redis.call('HINCRBY', KEYS[1], 'scored', #fresh)
return 'ok'
