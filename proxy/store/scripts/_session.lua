-- KEYS[1] state, KEYS[2] calls, whatever else a script adds after them.
-- Effects are replicated, not the scripts: the append-only file then holds plain commands, in one transaction per script.
redis.replicate_commands()

local function status()
  return redis.call('HGET', KEYS[1], 'status')
end

local function snapshot()
  return {redis.call('HGETALL', KEYS[1]), redis.call('LLEN', KEYS[2])}
end

-- Redis's own time, in epoch seconds, where no other is `given`.
local function clock(given)
  if given ~= '' then
    return given
  end
  local time = redis.call('TIME')
  return time[1] .. '.' .. string.format('%06d', time[2])
end

-- For what ends or frees something: a full Redis refuses the first write of a script alone, and never this one, which changes nothing.
local function go_on_when_full()
  redis.call('HDEL', KEYS[1], '')
end

local function frozen(word)
  return word ~= 'open' and word ~= 'closing'
end
