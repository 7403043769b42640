-- ARGV: task, index, attempt, node or '', now, class of the failure, packed record, seconds for which the node should not get it again,
-- whether the attempt does not count.
-- Returns 'again', 'over' when its attempts are used up, or 'lost' when the rollout is not the attempt's.
local task, index, node, now = ARGV[1], ARGV[2], ARGV[4], ARGV[5]
local key = rollout_key(task, index)
local was = status_to_requeue(task, index, ARGV[3], node)
if not was or was == 'queued' then
  return was and 'again' or 'lost'
end
if ARGV[9] == '1' then
  redis.call('HINCRBY', key, 'spared', 1)
end
if attempts_left(task, key) <= 0 then
  return 'over'
end
local failed_on = redis.call('HGET', key, 'node')
note_failure(task, index, ARGV[6], ARGV[7], now)
requeue(task, index, now)
redis.call('HSET', key, 'shun', failed_on, 'shun_until', now + ARGV[8])
return 'again'
