-- ARGV: queue, what no node has of what it requires or '', now, how many rollouts to examine. Notes that with the tasks whose rollouts
-- wait there, whenever it changes. Returns how many notes changed.
local queue, lacks, now = ARGV[1], ARGV[2], ARGV[3]
local stream = queue_key(queue)
if redis.call('EXISTS', stream) == 0 then
  redis.call('SREM', stranded, queue)
  return 0
end
redis.call(lacks == '' and 'SREM' or 'SADD', stranded, queue)
local noted = 0
local waiting = redis.call('XRANGE', stream, '(' .. last_delivered(stream), '+', 'COUNT', ARGV[4])
for _, entry in ipairs(waiting) do
  local task = entry[2][2]
  local key = task_key(task)
  if (redis.call('HGET', key, 'lacks') or '') ~= lacks then
    noted = noted + 1
    if lacks == '' then
      redis.call('HDEL', key, 'lacks')
    else
      redis.call('HSET', key, 'lacks', lacks)
      emit(task, now, 'task.waits', {reason = lacks})
    end
  end
end
return noted
