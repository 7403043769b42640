-- Returns, flat: state, number.
local answer = {}
for _, state in ipairs({'filling', 'leased', 'acked', 'dropped', 'dead'}) do
  answer[#answer + 1] = state
  answer[#answer + 1] = tonumber(redis.call('HGET', counts, state) or '0')
end
for state, size in pairs({ready = redis.call('ZCARD', ready), stale = redis.call('ZCARD', stale), opened = redis.call('HLEN', opening)}) do
  answer[#answer + 1] = state
  answer[#answer + 1] = size
end
return answer
