-- ARGV: task, body, outline, digest, now, number of rollouts, queue, usable samples wanted or 0, most attempts, the policy for
-- rollouts of lost nodes, callback URL or ''. Returns 'new', 'same' or 'conflict'.
local task, now, number, queue = ARGV[1], ARGV[5], tonumber(ARGV[6]), ARGV[7]
local key = task_key(task)
local before = redis.call('HGET', key, 'digest')
if before then
  affirm()
  return before == ARGV[4] and 'same' or 'conflict'
end
redis.call('HSET', key, 'body', ARGV[2], 'outline', ARGV[3], 'digest', ARGV[4], 'created_at', now, 'number', number)
redis.call('HSET', key, 'queue', queue, 'usable_wanted', ARGV[8], 'max_attempts', ARGV[9], 'on_lost', ARGV[10])
redis.call('HSET', key, 'status', 'queued', 'n:queued', number)
if ARGV[11] ~= '' then
  redis.call('HSET', key, 'callback_url', ARGV[11])
end
redis.call('ZADD', listing, redis.call('HINCRBY', totals, 'tasks', 1), task)
emit(task, now, 'task.created', {rollouts = number})
for index = 0, number - 1 do
  redis.call('HSET', rollout_key(task, index), 'status', 'queued', 'attempt', 0, 't:queued', now)
  enqueue(task, index, queue)
end
return 'new'
