-- KEYS: processes. ARGV: processes. Returns those that are alive.
redis.replicate_commands()
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
local alive = {}
for _, process in ipairs(ARGV) do
  local until_then = redis.call('ZSCORE', KEYS[1], process)
  if until_then and tonumber(until_then) > now then
    alive[#alive + 1] = process
  end
end
return alive
