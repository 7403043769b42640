-- ARGV: task, index, attempt, node or '', now. Returns whether the rollout was the attempt's and had a verdict.
local task, index, now = ARGV[1], ARGV[2], ARGV[5]
local key = rollout_key(task, index)
local was = status_of(task, index, ARGV[3], '')
local found = redis.call('HMGET', key, 'ends_as', 'usable', 'failure', 'reward')
if was and ENDED[was] and was == found[1] then
  affirm()
  return 1
end
if was ~= 'concluding' then
  return 0
end
local data = {failure = found[3] or nil, reward = tonumber(found[4] or nil)}
leave_queue(task, index)
set_status(task, index, found[1], now, data)
tally('rollout:' .. found[1])
if found[3] then
  tally('failure:' .. found[3])
end
if found[2] == '1' then
  redis.call('HINCRBY', task_key(task), 'usable', 1)
end
after_end(task, now)
return 1
