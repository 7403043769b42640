-- KEYS: state, calls, intents, delivered, answering. ARGV: the session's created_at or '', known calls, call id, intent, most bytes of the
-- session's calls or 0, then what is left of the budget after the known calls (calls, sampled tokens, all tokens; '': any number), what the
-- call wants of each ('': none), then what became of earlier replies.
-- Returns {status, accepted, records the caller does not know}; status 'full': the session has its most bytes. {'reserved', 0, {}, calls,
-- sampled tokens, all tokens}: the budget does not cover what the call wants beside these, which calls under way hold.
-- What is written before an intent is what its call holds, until the intent is gone or, given up, written anew without it.
local function find_held()
  local held = {0, 0, 0}
  local intents = redis.call('HGETALL', KEYS[3])
  for i = 1, #intents, 2 do
    local share = intents[i] ~= ARGV[3] and {string.match(intents[i + 1], '^(%d+) (%d+) (%d+)\n')} or {}
    for kind, amount in ipairs(share) do
      held[kind] = held[kind] + tonumber(amount)
    end
  end
  return held
end

local function is_covered(held)
  for kind = 1, 3 do
    if ARGV[5 + kind] ~= '' and held[kind] + (tonumber(ARGV[8 + kind]) or 0) > tonumber(ARGV[5 + kind]) then
      return false
    end
  end
  return true
end

local now, created_at, bytes = unpack(redis.call('HMGET', KEYS[1], 'status', 'created_at', 'bytes'))
local known, calls = tonumber(ARGV[2]), redis.call('LLEN', KEYS[2])
if not now or is_another(created_at, ARGV[1]) or known > calls then
  return {'missing', 0, {}}
end
if now == 'open' and ARGV[5] ~= '0' and tonumber(bytes or 0) >= tonumber(ARGV[5]) then
  return {'full', 0, {}}
end
if now == 'open' and known == calls then
  local prefix = ''
  if ARGV[6] ~= '' or ARGV[7] ~= '' or ARGV[8] ~= '' then
    local held = find_held()
    if not is_covered(held) then
      return {'reserved', 0, {}, unpack(held)}
    end
    for kind = 9, 11 do
      prefix = prefix .. (ARGV[kind] == '' and '0' or ARGV[kind]) .. (kind < 11 and ' ' or '\n')
    end
  end
  redis.call('HSET', KEYS[3], ARGV[3], prefix .. ARGV[4])
  note_answers(KEYS[4], KEYS[5], 12)
  return {now, 1, {}}
end
return {now, 0, redis.call('LRANGE', KEYS[2], known, -1)}
