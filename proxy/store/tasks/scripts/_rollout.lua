-- KEYS[1] is the prefix of all keys. Fields of a rollout: `status`, `attempt`, `spared` (attempts that do not count), `node`, `queue` and
-- `entry` (its place there), `verdict`, `ends_as`, `usable`, `x:<n>` (failures of earlier attempts), `failed` (how many), `t:<status>`
-- (when), `f:<field>` (what nodes reported), `shun` and `shun_until` (the node that should not get it again until then), `member` (its
-- group has a session of it, or will have one). A task's `members` counts those.
redis.replicate_commands()

local base = KEYS[1]
local listing, over, queues, arrivals = base .. ':listing', base .. ':over', base .. ':queues', base .. ':arrivals'
local nodes, seen, takes, totals = base .. ':nodes', base .. ':seen', base .. ':takes', base .. ':totals'
local closing, abandoned, callbacks = base .. ':closing', base .. ':abandoned', base .. ':callbacks'
local stranded, hold, owners = base .. ':stranded', base .. ':hold', base .. ':owners'

local GROUP, SCHEMA = 'nodes', 1
local EVENTS_KEPT = 20000
local ENDED = {completed = true, failed = true, timeout = true, cancelled = true}

local function task_key(task)
  return base .. ':t:' .. task
end

local function rollout_key(task, index)
  return base .. ':t:' .. task .. ':' .. index
end

local function events_key(task)
  return base .. ':t:' .. task .. ':events'
end

local function queue_key(queue)
  return base .. ':q:' .. queue
end

local function tally(what)
  redis.call('HINCRBY', totals, what, 1)
end

-- A write that changes nothing: a script that finds its work done must write too, for WAIT to wait for.
local function affirm()
  redis.call('HINCRBY', totals, 'tasks', 0)
end

local function emit(task, now, kind, data)
  redis.call('XADD', events_key(task), 'MAXLEN', '~', EVENTS_KEPT, '*', 'kind', kind, 'at', now, 'data', cmsgpack.pack(data))
end

local woken = false

-- Wakes waiting nodes, once per script.
local function wake_nodes()
  if not woken then
    woken = true
    redis.call('XADD', arrivals, 'MAXLEN', 1, '*', 'ready', 1)
  end
end

-- `data` holds further fields of the event.
local function set_status(task, index, status, now, data)
  local key = rollout_key(task, index)
  local was = redis.call('HGET', key, 'status')
  if was ~= status then
    redis.call('HINCRBY', task_key(task), 'n:' .. was, -1)
    redis.call('HINCRBY', task_key(task), 'n:' .. status, 1)
  end
  redis.call('HSET', key, 'status', status, 't:' .. status, now)
  data.index, data.status = tonumber(index), status
  data.attempt = tonumber(redis.call('HGET', key, 'attempt'))
  emit(task, now, 'rollout.' .. status, data)
end

local function has(list, wanted)
  for _, each in ipairs(list) do
    if each == wanted then
      return true
    end
  end
  return false
end

-- Whether `place` meets the requirements of a queue (its name, decoded).
local function fits(wanted, place)
  if wanted[3] > place.cpus or wanted[4] > place.memory_mb then
    return false
  end
  for _, kind in ipairs(wanted[2]) do
    if not has(place.runtimes, kind) then
      return false
    end
  end
  for name, value in pairs(wanted[5]) do
    if place.labels[name] ~= value then
      return false
    end
  end
  return true
end

-- Rollouts that had a node before wait ahead of those that never had one, so that groups that have begun are completed; those to which
-- others gave way wait ahead of both.
local RETURNED, PREFERRED = '5', '7'

local function front_of(queue, rank)
  return (string.gsub(queue, '^%[(%d+)[.%d]*', '[%1.' .. rank))
end

-- Puts the rollout at the end of the queue.
local function enqueue(task, index, queue)
  local stream = queue_key(queue)
  if redis.call('SADD', queues, queue) == 1 then
    redis.call('XGROUP', 'CREATE', stream, GROUP, '0', 'MKSTREAM')
  end
  -- Numbered across queues, so that entries of several queues are ordered.
  local entry = redis.call('XADD', stream, redis.call('HINCRBY', totals, 'places', 1) .. '-0', 'task', task, 'index', index)
  redis.call('HSET', rollout_key(task, index), 'queue', queue, 'entry', entry)
  wake_nodes()
end

-- The id of the newest entry of a queue that a node was given.
local function last_delivered(stream)
  local group = redis.call('XINFO', 'GROUPS', stream)[1]
  for i = 1, #group, 2 do
    if group[i] == 'last-delivered-id' then
      return group[i + 1]
    end
  end
end

local function drop_entry(queue, entry)
  local stream = queue_key(queue)
  if redis.call('EXISTS', stream) == 0 then
    return
  end
  redis.call('XACK', stream, GROUP, entry)
  redis.call('XDEL', stream, entry)
  if redis.call('XLEN', stream) == 0 then
    redis.call('DEL', stream)
    redis.call('SREM', queues, queue)
  end
end

local function leave_queue(task, index)
  local place = redis.call('HMGET', rollout_key(task, index), 'queue', 'entry')
  drop_entry(place[1], place[2])
end

local function join_group(task, key)
  if redis.call('HSETNX', key, 'member', 1) == 1 then
    redis.call('HINCRBY', task_key(task), 'members', 1)
  end
end

local function leave_group(task, key)
  if redis.call('HDEL', key, 'member') == 1 then
    redis.call('HINCRBY', task_key(task), 'members', -1)
  end
end

local function has_begun(task)
  return tonumber(redis.call('HGET', task_key(task), 'members') or 0) > 0
end

-- Removes what the finished attempt reported. When it was queued stays, for how long the next one has waited.
local function forget_attempt(task, key)
  leave_group(task, key)
  for _, field in ipairs(redis.call('HKEYS', key)) do
    local mark = string.sub(field, 1, 2)
    if (mark == 't:' and field ~= 't:queued') or mark == 'f:' then
      redis.call('HDEL', key, field)
    end
  end
  redis.call('HDEL', key, 'node', 'verdict', 'ends_as', 'usable')
end

-- `record` is a packed FailureRecord.
local function note_failure(task, index, failure, record, now)
  local key = rollout_key(task, index)
  local number = redis.call('HINCRBY', key, 'failed', 1)
  redis.call('HSET', key, 'x:' .. number, record)
  tally('failure:' .. failure)
  tally('retried')
  emit(task, now, 'rollout.retried', {index = tonumber(index), attempt = tonumber(redis.call('HGET', key, 'attempt')), failure = failure})
end

local function requeue(task, index, now)
  local key = rollout_key(task, index)
  leave_queue(task, index)
  forget_attempt(task, key)
  set_status(task, index, 'queued', now, {})
  enqueue(task, index, front_of(redis.call('HGET', task_key(task), 'queue'), RETURNED))
end

local function attempts_left(task, key)
  local counted = redis.call('HMGET', key, 'attempt', 'spared')
  return tonumber(redis.call('HGET', task_key(task), 'max_attempts')) - (tonumber(counted[1]) - tonumber(counted[2] or 0))
end

-- The rollout's status if it belongs to `attempt` (and to `node`, unless that is ''), otherwise nil.
local function status_of(task, index, attempt, node)
  local found = redis.call('HMGET', rollout_key(task, index), 'attempt', 'node', 'status')
  if found[1] ~= attempt or (node ~= '' and found[2] ~= node) then
    return nil
  end
  return found[3]
end

-- The same for a step that requeues the rollout: 'queued' if the step is repeated, for it removes the node; nil, too, for a rollout that has
-- ended or has a verdict.
local function status_to_requeue(task, index, attempt, node)
  local was = status_of(task, index, attempt, '')
  if was == 'queued' then
    affirm()
    return was
  end
  was = status_of(task, index, attempt, node)
  return was and not ENDED[was] and was ~= 'concluding' and was or nil
end

local function end_task(task, status, now)
  local key = task_key(task)
  redis.call('HSET', key, 'status', status, 'ended_at', now)
  redis.call('HDEL', key, 'lacks')
  redis.call('ZADD', over, now, task)
  tally('task:' .. status)
  if redis.call('HEXISTS', key, 'callback_url') == 1 then
    redis.call('HSET', key, 'callback_next', now)
    redis.call('ZADD', callbacks, now, task)
  end
  emit(task, now, 'task.ended', {status = status, usable = tonumber(redis.call('HGET', key, 'usable') or 0)})
end

local function to_close(task, index, now)
  if redis.call('ZADD', closing, now, task .. ':' .. index) == 1 then
    redis.call('HINCRBY', task_key(task), 'unclosed', 1)
  end
end

-- Ends the rollout from outside; its session is left to be closed, or to be deleted if its group has no other.
local function end_from_outside(task, index, status, failure, message, now)
  local key = rollout_key(task, index)
  local verdict = {status = status, failure = {failure = failure, message = message}}
  redis.call('HSET', key, 'verdict', cmsgpack.pack({SCHEMA, verdict}))
  leave_queue(task, index)
  set_status(task, index, status, now, {failure = failure})
  tally('failure:' .. failure)
  tally('rollout:' .. status)
  -- The other rollouts go on, and their group waits for a session of this one.
  if status == 'failed' then
    join_group(task, key)
  end
  local attempt = redis.call('HGET', key, 'attempt')
  if has_begun(task) then
    to_close(task, index, now)
  elseif attempt ~= '0' then
    redis.call('ZADD', abandoned, now, task .. ':' .. index .. ':' .. attempt)
  end
end

local function unended(task)
  local found = {}
  for index = 0, tonumber(redis.call('HGET', task_key(task), 'number')) - 1 do
    local status = redis.call('HGET', rollout_key(task, index), 'status')
    if not ENDED[status] then
      found[#found + 1] = {index = index, status = status}
    end
  end
  return found
end

-- After a rollout's end: stops the others once enough are usable, and ends the task with its last rollout.
local function after_end(task, now)
  local key = task_key(task)
  local found = redis.call('HMGET', key, 'usable_wanted', 'usable', 'status')
  local wanted, usable = tonumber(found[1]), tonumber(found[2] or 0)
  if found[3] == 'completed' or found[3] == 'cancelled' then
    return
  end
  local stop = wanted > 0 and usable >= wanted
  if stop then
    local message = usable .. ' usable samples were there, as many as were wanted'
    for _, other in ipairs(unended(task)) do
      -- A rollout with a verdict is done except for its session.
      if other.status ~= 'concluding' then
        end_from_outside(task, other.index, 'cancelled', 'early_stopped', message, now)
      end
    end
  end
  local ended = 0
  for status in pairs(ENDED) do
    ended = ended + tonumber(redis.call('HGET', key, 'n:' .. status) or 0)
  end
  if ended == tonumber(redis.call('HGET', key, 'number')) then
    end_task(task, 'completed', now)
  end
end
