-- KEYS: state, calls, index, intents, delivered, answering. ARGV: the session's created_at or '', intent id, now or '', bytes of all calls,
-- process, number of calls, then call id, digest, record of each, then what became of earlier replies.
-- Returns {'ok', calls}, {'conflict', call id}, {'frozen', status} or {'missing'}.
local now, created_at = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at'))
if not now or is_another(created_at, ARGV[1]) then
  return {'missing'}
end
local fresh, last = {}, 6 + 3 * ARGV[6]
for i = 7, last, 3 do
  local digest = redis.call('HGET', KEYS[3], ARGV[i])
  if not digest then
    fresh[#fresh + 1] = i
  elseif digest ~= ARGV[i + 1] then
    return {'conflict', ARGV[i]}
  end
end
if #fresh > 0 and frozen(now) then
  return {'frozen', now}
end
-- The push is the first write: a full Redis then refuses it before anything is written.
for _, i in ipairs(fresh) do
  redis.call('RPUSH', KEYS[2], ARGV[i + 2])
  redis.call('HSET', KEYS[3], ARGV[i], ARGV[i + 1])
  redis.call('HSET', KEYS[6], ARGV[i], ARGV[5])
end
redis.call('HDEL', KEYS[4], ARGV[2])
note_answers(KEYS[5], KEYS[6], last + 1)
if #fresh > 0 then
  redis.call('HINCRBY', KEYS[1], 'bytes', ARGV[4])
end
-- A repetition writes too: WAIT waits for the connection's last write, and this may be another connection than the first time.
redis.call('HSET', KEYS[1], 'updated_at', #fresh > 0 and clock(ARGV[3]) or redis.call('HGET', KEYS[1], 'updated_at'))
return {'ok', redis.call('LLEN', KEYS[2])}
