-- ARGV: latest end, limit. Returns how many tasks that ended before were deleted.
local AT_ONCE = 100
local deleted, limit, kept = 0, tonumber(ARGV[2]), 0

-- False if its sessions or its callback are not settled.
local function forget(task)
  local key = task_key(task)
  local found = redis.call('HMGET', key, 'unclosed', 'number')
  if tonumber(found[1] or 0) > 0 or redis.call('ZSCORE', callbacks, task) then
    return false
  end
  for index = 0, tonumber(found[2] or 0) - 1 do
    redis.call('DEL', rollout_key(task, index))
  end
  redis.call('DEL', key, events_key(task))
  redis.call('ZREM', listing, task)
  redis.call('ZREM', over, task)
  return true
end

repeat
  local found = redis.call('ZRANGEBYSCORE', over, '-inf', ARGV[1], 'LIMIT', kept, AT_ONCE)
  for _, task in ipairs(found) do
    if deleted == limit then
      return deleted
    elseif forget(task) then
      deleted = deleted + 1
    else
      kept = kept + 1
    end
  end
until #found < AT_ONCE
return deleted
