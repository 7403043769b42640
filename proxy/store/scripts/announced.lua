-- ARGV: latest time, limit. Returns, flat: session id, time, request or ''.
local found = redis.call('ZRANGEBYSCORE', announced, '-inf', ARGV[1], 'WITHSCORES', 'LIMIT', 0, ARGV[2])
local answer = {}
for i = 1, #found, 2 do
  answer[#answer + 1] = found[i]
  answer[#answer + 1] = found[i + 1]
  answer[#answer + 1] = redis.call('HGET', requests, found[i]) or ''
end
return answer
