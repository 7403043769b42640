-- KEYS: state and calls of each session. Returns, of each, what _session.lua's snapshot() does.
local found = {}
for i = 1, #KEYS, 2 do
  found[#found + 1] = {redis.call('HGETALL', KEYS[i]), redis.call('LLEN', KEYS[i + 1])}
end
return found
