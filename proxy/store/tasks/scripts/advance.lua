-- ARGV: task, index, attempt, node or '', status, now, then each field and packed value. Returns whether the rollout was the attempt's.
local task, index, status = ARGV[1], ARGV[2], ARGV[5]
local was = status_of(task, index, ARGV[3], ARGV[4])
if not was or ENDED[was] or was == 'concluding' or was == 'queued' then
  return 0
end
for i = 7, #ARGV, 2 do
  redis.call('HSET', rollout_key(task, index), 'f:' .. ARGV[i], ARGV[i + 1])
end
if status == 'running' then
  join_group(task, rollout_key(task, index))
end
-- A repeated step, whose first answer was lost, counts once.
if was ~= status then
  set_status(task, index, status, ARGV[6], {})
end
return 1
