-- KEYS: state, calls, delivered, answering. ARGV: status, reward or '', error or '', closed_at, then what became of replies. Returns {'ok', snapshot}, {'frozen', status} or {'missing'}.
go_on_when_full()
local now = status()
if not now then
  return {'missing'}
end
if frozen(now) then
  if now ~= ARGV[1] then
    return {'frozen', now}
  end
  redis.call('HSET', KEYS[1], 'status', now) -- a write for WAIT to wait for
  return {'ok', snapshot()}
end
note_answers(KEYS[3], KEYS[4], 5)
redis.call('DEL', KEYS[4])
redis.call('HSET', KEYS[1], 'status', ARGV[1], 'closed_at', ARGV[4], 'updated_at', ARGV[4])
if ARGV[2] ~= '' then
  redis.call('HSET', KEYS[1], 'reward', ARGV[2])
end
if ARGV[3] ~= '' then
  redis.call('HSET', KEYS[1], 'error', ARGV[3])
end
return {'ok', snapshot()}
