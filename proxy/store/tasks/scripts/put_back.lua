-- ARGV: task, index, attempt, node or '', now. Returns whether the rollout was the attempt's.
local task, index = ARGV[1], ARGV[2]
local was = status_to_requeue(task, index, ARGV[3], ARGV[4])
if not was or was == 'queued' then
  return was and 1 or 0
end
redis.call('HINCRBY', rollout_key(task, index), 'spared', 1)
requeue(task, index, ARGV[5])
return 1
