-- Returns, flat: queue, number of rollouts waiting in it.
local depths = {}
for _, name in ipairs(redis.call('SMEMBERS', queues)) do
  local pending = redis.call('XPENDING', queue_key(name), GROUP)[1]
  depths[#depths + 1] = name
  depths[#depths + 1] = redis.call('XLEN', queue_key(name)) - pending
end
return depths
