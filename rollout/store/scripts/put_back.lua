-- ARGV: task, index, attempt, node or '', now. Returns whether the rollout was the attempt's.
local task, index = ARGV[1], ARGV[2]
local was = status_of_or_queued(task, index, ARGV[3], ARGV[4])
if not was or ENDED[was] or was == 'concluding' then
  return 0
end
if was == 'queued' then
  affirm()
  return 1
end
redis.call('HINCRBY', rollout_key(task, index), 'spared', 1)
requeue(task, index, ARGV[5])
return 1
