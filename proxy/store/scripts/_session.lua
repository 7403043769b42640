-- KEYS[1] state, KEYS[2] calls, then what the script adds.
-- Replicates effects instead of scripts: the append-only file then holds plain commands, one transaction per script.
redis.replicate_commands()

local function status()
  return redis.call('HGET', KEYS[1], 'status')
end

-- Whether the session is a later one of the same id than the one that was `expected`; '': that one or any other.
local function is_another(created_at, expected)
  return expected ~= '' and created_at ~= expected
end

local function snapshot()
  return {redis.call('HGETALL', KEYS[1]), redis.call('LLEN', KEYS[2])}
end

-- `given`, or Redis's time in epoch seconds when it is ''.
local function clock(given)
  if given ~= '' then
    return given
  end
  local time = redis.call('TIME')
  return time[1] .. '.' .. string.format('%06d', time[2])
end

-- For scripts that end or free something: a full Redis checks memory at a script's first write alone, and never refuses this one, an
-- HDEL that changes nothing.
local function go_on_when_full()
  redis.call('HDEL', KEYS[1], '')
end

local function frozen(word)
  return word ~= 'open' and word ~= 'closing'
end

-- From ARGV[first] on: call id, and '1' if its reply was delivered. Only of calls that are being answered: a closed session has none.
-- Frees memory at first: in a script that may be refused by a full Redis another write comes before.
local function note_answers(delivered, answering, first)
  for i = first, #ARGV, 2 do
    if redis.call('HDEL', answering, ARGV[i]) == 1 and ARGV[i + 1] == '1' then
      redis.call('SADD', delivered, ARGV[i])
    end
  end
end
