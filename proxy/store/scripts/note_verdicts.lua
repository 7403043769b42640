-- KEYS: state, calls. ARGV: the session's created_at, judge, verdicts (packed). Returns 'ok', 'missing' or 'leased'.
local created_at, leased = unpack(redis.call('HMGET', KEYS[1], 'created_at', 'leased'))
if not created_at or is_another(created_at, ARGV[1]) then
  return 'missing'
end
if leased then
  return 'leased'
end
redis.call('HSET', KEYS[1], 'judged', '1', 'verdicts:' .. ARGV[2], ARGV[3])
return 'ok'
