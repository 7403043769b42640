-- Each queue, and how many rollouts wait in it.
local depths = {}
for _, name in ipairs(redis.call('SMEMBERS', queues)) do
  local under_way = redis.call('XPENDING', queue_key(name), GROUP)[1]
  depths[#depths + 1] = name
  depths[#depths + 1] = redis.call('XLEN', queue_key(name)) - under_way
end
return depths
