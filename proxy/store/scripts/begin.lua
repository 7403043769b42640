-- KEYS: state, calls, intents, delivered, answering. ARGV: the session's created_at or '', known calls, call id, intent, most bytes of the
-- session's calls or 0, then what became of earlier replies.
-- Returns {status, accepted, records the caller does not know}; status 'full': the session has its most bytes.
local now, created_at, bytes = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at', 'bytes'))
local known, calls = tonumber(ARGV[2]), redis.call('LLEN', KEYS[2])
if not now or is_another(created_at, ARGV[1]) or known > calls then
  return {'missing', 0, {}}
end
if now == 'open' and ARGV[5] ~= '0' and tonumber(bytes or 0) >= tonumber(ARGV[5]) then
  return {'full', 0, {}}
end
if now == 'open' and known == calls then
  redis.call('HSET', KEYS[3], ARGV[3], ARGV[4])
  note_answers(KEYS[4], KEYS[5], 6)
  return {now, 1, {}}
end
return {now, 0, redis.call('LRANGE', KEYS[2], known, -1)}
