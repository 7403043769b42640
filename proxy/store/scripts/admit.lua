-- ARGV: group id, session id, limit or 0, now, what a group needs, whether to count a refusal, the weight version, most versions behind or -1,
-- groups per version, then each other policy and its version.
-- Returns {whether the session is admitted, undelivered groups, whether it was noted, versions ahead or -1}.
local group_id, session_id, limit = ARGV[1], ARGV[2], tonumber(ARGV[3])
local most_behind = tonumber(ARGV[8])
local waiting, behind = undelivered(), -1
if most_behind >= 0 then
  local versions = versions_from(ARGV[7], 10)
  see_versions(versions)
  behind = versions_ahead(versions, tonumber(ARGV[9]))
end

local function note(entry)
  entry.ids[#entry.ids + 1] = session_id
  redis.call('HSET', opening, group_id, cmsgpack.pack(entry))
  redis.call('HSET', admitted, session_id, group_id)
  redis.call('ZADD', unseen, ARGV[4], session_id)
end

-- A repeated request means that the session is about to be created.
redis.call('ZADD', unseen, 'XX', ARGV[4], session_id)
if redis.call('HEXISTS', admitted, session_id) == 1 or redis.call('HEXISTS', members, session_id) == 1 then
  return {1, waiting, 0, behind}
end
local entry = load_packed(opening, group_id)
if entry then
  note(entry)
  return {1, waiting, 1, behind}
end
local _, group = newcomers_round(group_id, ARGV[5])
if group then
  return {1, waiting, 0, behind}
end
local refused = limit > 0 and waiting >= limit and 'refused' or behind > most_behind and 'refused_stale'
if refused then
  if ARGV[6] == '1' then
    tally(refused)
  end
  return {0, waiting, 0, behind}
end
note({at = tonumber(ARGV[4]), ids = {}})
return {1, waiting + 1, 1, behind}
