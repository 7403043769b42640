-- ARGV: group id, session id, limit, now, policy.
-- {whether the session is let in, undelivered groups, whether it was noted}
local group_id, session_id = ARGV[1], ARGV[2]
local opened = redis.call('HLEN', opening)
local undelivered = tonumber(redis.call('HGET', counts, 'filling') or '0') + redis.call('ZCARD', ready) + opened

local function note(entry)
  entry.ids[#entry.ids + 1] = session_id
  redis.call('HSET', opening, group_id, cmsgpack.pack(entry))
  redis.call('HSET', admitted, session_id, group_id)
end

if redis.call('HEXISTS', admitted, session_id) == 1 or redis.call('HEXISTS', members, session_id) == 1 then
  return {1, undelivered, 0}
end
local entry = load_packed(opening, group_id)
if entry then
  note(entry)
  return {1, undelivered, 1}
end
local _, group = newcomers_round(group_id, ARGV[5])
if group then
  return {1, undelivered, 0}
end
if undelivered >= tonumber(ARGV[3]) then
  tally('refused')
  return {0, undelivered, 0}
end
note({at = tonumber(ARGV[4]), ids = {}})
return {1, undelivered + 1, 1}
