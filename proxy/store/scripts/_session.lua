-- KEYS[1] state, KEYS[2] calls, whatever else a script adds after them.
-- Effects are replicated, not the scripts: the append-only file then holds plain commands, in one transaction per script.
redis.replicate_commands()

local function status()
  return redis.call('HGET', KEYS[1], 'status')
end

local function snapshot()
  return {redis.call('HGETALL', KEYS[1]), redis.call('LLEN', KEYS[2])}
end

local function frozen(word)
  return word ~= 'open' and word ~= 'closing'
end
