-- ARGV: limit. {{group id, {session ids}, reason, died_at}, ...}
local answer = {}
for _, ref in ipairs(redis.call('ZREVRANGE', dead, 0, tonumber(ARGV[1]) - 1)) do
  local group = load_packed(groups, ref)
  answer[#answer + 1] = {group.group_id, session_ids(group), group.reason, redis.call('ZSCORE', dead, ref)}
end
return answer
