-- Flat: state, number
local answer = {}
for _, state in ipairs({'filling', 'leased', 'acked', 'dropped', 'dead'}) do
  answer[#answer + 1] = state
  answer[#answer + 1] = tonumber(redis.call('HGET', counts, state) or '0')
end
for state, key in pairs({ready = ready, stale = stale}) do
  answer[#answer + 1] = state
  answer[#answer + 1] = redis.call('ZCARD', key)
end
return answer
