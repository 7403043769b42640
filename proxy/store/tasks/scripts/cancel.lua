-- ARGV: task, now. Returns the index and fields of each rollout that it ended, as it stood; false if there is no such task.
local task, now = ARGV[1], ARGV[2]
local key = task_key(task)
local status = redis.call('HGET', key, 'status')
if not status then
  return false
end
local stood = {}
if status == 'completed' or status == 'cancelled' then
  affirm()
  return stood
end
for _, each in ipairs(unended(task)) do
  stood[#stood + 1] = each.index
  stood[#stood + 1] = redis.call('HGETALL', rollout_key(task, each.index))
  end_from_outside(task, each.index, 'cancelled', 'cancelled', 'the task was cancelled', now)
end
end_task(task, 'cancelled', now)
return stood
