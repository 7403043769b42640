-- KEYS: state, calls, intents, delivered, answering. ARGV: known calls, call id, intent, most bytes of the session's calls or 0, then what
-- became of earlier replies.
-- Returns {status, accepted, created_at, records the caller does not know}; status 'full': the session has its most bytes.
local now, created_at, bytes = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at', 'bytes'))
if not now then
  return {'missing', 0, '0', {}}
end
local known, calls = tonumber(ARGV[1]), redis.call('LLEN', KEYS[2])
if known > calls then
  return {'missing', 0, created_at, {}}
end
if now == 'open' and ARGV[4] ~= '0' and tonumber(bytes or 0) >= tonumber(ARGV[4]) then
  return {'full', 0, created_at, {}}
end
if now == 'open' and known == calls then
  redis.call('HSET', KEYS[3], ARGV[2], ARGV[3])
  note_answers(KEYS[4], KEYS[5], 5)
  return {now, 1, created_at, {}}
end
return {now, 0, created_at, redis.call('LRANGE', KEYS[2], known, -1)}
