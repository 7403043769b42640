-- ARGV: node, room as JSON or '' for a server, which only recovers, lease in milliseconds, now, a token of this request.
-- Returns {task, index, attempt, whether it has a verdict, body, the rollout's fields}, or false.
local node, room, lease, now = ARGV[1], ARGV[2] ~= '' and cjson.decode(ARGV[2]), ARGV[3], ARGV[4]
local SHUN_SECONDS = 30
local AT_ONCE = 100

-- Queues that this node has room for, the greatest priority first.
local function find_suitable()
  local found = {}
  for _, name in ipairs(redis.call('SMEMBERS', queues)) do
    local wanted = cjson.decode(name)
    if not room or fits(wanted, room) then
      found[#found + 1] = {name = name, stream = queue_key(name), priority = wanted[1]}
    end
  end
  table.sort(found, function(a, b)
    if a.priority ~= b.priority then
      return a.priority > b.priority
    end
    return a.name < b.name
  end)
  return found
end

local function describe(task, index, resumed)
  local fields = redis.call('HGETALL', rollout_key(task, index))
  local attempt = redis.call('HGET', rollout_key(task, index), 'attempt')
  return {task, index, attempt, resumed and 1 or 0, redis.call('HGET', task_key(task), 'body'), fields}
end

local function hand_out(task, index)
  local key = rollout_key(task, index)
  if redis.call('HGET', task_key(task), 'status') == 'queued' then
    redis.call('HSET', task_key(task), 'status', 'running')
  end
  redis.call('HDEL', task_key(task), 'lacks')
  forget_attempt(task, key)
  redis.call('HDEL', key, 'shun', 'shun_until')
  redis.call('HINCRBY', key, 'attempt', 1)
  redis.call('HSET', key, 'node', node)
  set_status(task, index, 'preparing', now, {node = node})
  tally('attempts')
  return describe(task, index, false)
end

-- Task, index and status of an entry whose rollout has not ended. Any other entry is dropped.
local function read_entry(queue, entry)
  local read = redis.call('XRANGE', queue.stream, entry, entry)
  if read[1] then
    local task, index = read[1][2][2], read[1][2][4]
    local found = redis.call('HMGET', rollout_key(task, index), 'status', 'entry')
    if found[1] and not ENDED[found[1]] and found[2] == entry then
      return task, index, found[1]
    end
  end
  drop_entry(queue.name, entry)
end

-- Recovers a rollout whose node is silent: returns it to be taken, or nil.
local function recover(queue, entry, task, index, status)
  local key = rollout_key(task, index)
  local lost, attempt = redis.call('HGET', key, 'node') or '', redis.call('HGET', key, 'attempt')
  if status == 'concluding' then
    redis.call('XCLAIM', queue.stream, GROUP, node, 0, entry, 'JUSTID')
    redis.call('HSET', key, 'node', node)
    return describe(task, index, true)
  end
  local message = 'the node ' .. lost .. ' gave no sign of life'
  local fails = redis.call('HGET', task_key(task), 'on_lost') == 'fail' or attempts_left(task, key) <= 0
  if status ~= 'queued' and fails then
    end_from_outside(task, index, 'failed', 'node_lost', message, now)
    after_end(task, now)
    return nil
  end
  if not room then
    return nil
  end
  if status ~= 'queued' then
    note_failure(task, index, 'node_lost', cmsgpack.pack({SCHEMA, {failure = 'node_lost', message = message, look = lost}}), now)
    redis.call('ZADD', abandoned, now, task .. ':' .. index .. ':' .. attempt)
  end
  redis.call('XCLAIM', queue.stream, GROUP, node, 0, entry, 'JUSTID')
  return hand_out(task, index)
end

local leases = {}

-- A node's lease in milliseconds, from its last beat; 0 if it has none.
local function lease_of(name)
  if not leases[name] then
    local state = redis.call('HGET', nodes, name)
    leases[name] = 1000 * (state and cmsgpack.unpack(state)[2].lease_seconds or 0)
  end
  return leases[name]
end

-- The next entries behind `last` whose nodes were silent for this request's lease.
local function find_silent(queue, last)
  if redis.call('EXISTS', queue.stream) == 0 then
    return {}
  end
  return redis.call('XPENDING', queue.stream, GROUP, 'IDLE', lease, last and '(' .. last or '-', '+', AT_ONCE)
end

-- Examines all silent entries: those that cannot be taken here stay in place.
local function take_lost(queue)
  local last
  repeat
    local found = find_silent(queue, last)
    for _, pending in ipairs(found) do
      last = pending[1]
      if pending[3] >= lease_of(pending[2]) then
        local task, index, status = read_entry(queue, last)
        local taken = task and recover(queue, last, task, index, status)
        if taken then
          return taken
        end
      end
    end
  until #found < AT_ONCE
end

-- Whether another live node could take rollouts of the queue, now or later.
local function others_fit(queue)
  local wanted = cjson.decode(queue.name)
  for _, name in ipairs(redis.call('ZRANGEBYSCORE', seen, now - 2 * SHUN_SECONDS, '+inf')) do
    local state = name ~= node and redis.call('HGET', nodes, name)
    local other = state and cmsgpack.unpack(state)[2]
    if other and not other.draining and fits(wanted, other) then
      return true
    end
  end
  return false
end

local held = redis.call('EXISTS', hold) == 1

-- The next entry of a queue, or nil if its rollout failed on this node and others could take it, or would begin a group while those wait:
-- while it is left where it is, the entries behind it wait too.
local function find_next(queue)
  if redis.call('EXISTS', queue.stream) == 0 then
    return nil
  end
  local read = redis.call('XRANGE', queue.stream, '(' .. last_delivered(queue.stream), '+', 'COUNT', 1)
  if not read[1] then
    return nil
  end
  local task, index = read[1][2][2], read[1][2][4]
  if held and not has_begun(task) then
    return nil
  end
  local shun = redis.call('HMGET', rollout_key(task, index), 'shun', 'shun_until')
  if shun[1] == node and tonumber(now) < tonumber(shun[2]) and others_fit(queue) then
    return nil
  end
  return read[1][1]
end

local function number_of(entry)
  return tonumber(string.match(entry, '%d+'))
end

-- Takes the longest waiting rollout of the queues of one priority.
local function take_waiting(level)
  while true do
    local first, entry
    for _, queue in ipairs(level) do
      local waiting = find_next(queue)
      if waiting and (not entry or number_of(waiting) < number_of(entry)) then
        first, entry = queue, waiting
      end
    end
    if not first then
      return nil
    end
    redis.call('XREADGROUP', 'GROUP', GROUP, node, 'COUNT', 1, 'STREAMS', first.stream, '>')
    local task, index = read_entry(first, entry)
    if task then
      return hand_out(task, index)
    end
  end
end

-- What this request was answered before: it is repeated when its answer was lost.
local function find_repeated()
  local last = redis.call('HGET', takes, node)
  local token, task, index, resumed = string.match(last or '', '^([^:]*):([^:]*):([^:]*):(.)$')
  if token ~= ARGV[5] then
    return nil
  end
  local found = redis.call('HMGET', rollout_key(task, index), 'node', 'status')
  return found[1] == node and not ENDED[found[2]] and describe(task, index, resumed == '1')
end

local function remember(taken)
  if room then
    redis.call('HSET', takes, node, table.concat({ARGV[5], taken[1], taken[2], taken[4]}, ':'))
  end
  return taken
end

local again = find_repeated()
if again then
  affirm()
  return again
end
local found = find_suitable()
local from = 1
while from <= #found do
  local level = {}
  while found[from] and (#level == 0 or found[from].priority == level[1].priority) do
    level[#level + 1] = found[from]
    from = from + 1
  end
  for _, queue in ipairs(level) do
    local taken = take_lost(queue)
    if taken then
      return remember(taken)
    end
  end
  local taken = room and take_waiting(level)
  if taken then
    return remember(taken)
  end
end
return false
