-- ARGV: task, index, attempt, node or '', now, seconds for which no rollout is taken that would begin a group.
-- Returns 'queued' when the rollout is queued again, without using up an attempt; 'kept' when no rollout that this node could take waits
-- for a place in a group that has begun; 'lost' when the rollout is not the attempt's.
local AT_ONCE = 100
local task, index, node, now = ARGV[1], ARGV[2], ARGV[4], ARGV[5]

-- Prefers the first rollout of the queue whose group has begun. Returns whether there is one.
local function prefer_begun(queue)
  local stream = queue_key(queue)
  for _, entry in ipairs(redis.call('XRANGE', stream, '(' .. last_delivered(stream), '+', 'COUNT', AT_ONCE)) do
    local fields = entry[2]
    if has_begun(fields[2]) then
      leave_queue(fields[2], fields[4])
      enqueue(fields[2], fields[4], front_of(queue, PREFERRED))
      return true
    end
  end
  return false
end

local function prefer_any()
  local state = redis.call('HGET', nodes, node)
  local place = state and cmsgpack.unpack(state)[2]
  for _, queue in ipairs(place and redis.call('SMEMBERS', queues) or {}) do
    if fits(cjson.decode(queue), place) and prefer_begun(queue) then
      return true
    end
  end
  return false
end

local was = status_to_requeue(task, index, ARGV[3], node)
if not was or was == 'queued' then
  return was or 'lost'
end
if not prefer_any() then
  return 'kept'
end
redis.call('HINCRBY', rollout_key(task, index), 'spared', 1)
requeue(task, index, now)
redis.call('SET', hold, 1, 'PX', 1000 * ARGV[6])
return 'queued'
