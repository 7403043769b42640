-- ARGV: task, index, attempt, node or '', now, packed verdict, status it ends as, whether it is usable, reward or '', class of its
-- failure or ''. Returns whether the rollout was the attempt's.
local task, index = ARGV[1], ARGV[2]
local was = status_of(task, index, ARGV[3], ARGV[4])
if not was or ENDED[was] or was == 'queued' then
  return 0
end
affirm()
-- The first verdict stands: the session may already be closing with it.
if was ~= 'concluding' then
  redis.call('HSET', rollout_key(task, index), 'verdict', ARGV[6], 'ends_as', ARGV[7], 'usable', ARGV[8])
  if ARGV[9] ~= '' then
    redis.call('HSET', rollout_key(task, index), 'reward', ARGV[9])
  end
  if ARGV[10] ~= '' then
    redis.call('HSET', rollout_key(task, index), 'failure', ARGV[10])
  end
  join_group(task, rollout_key(task, index))
  set_status(task, index, 'concluding', ARGV[5], {})
end
return 1
