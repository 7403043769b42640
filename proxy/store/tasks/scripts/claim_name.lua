-- ARGV: node, a key that shows who asks, now, whether a name may pass from a node that was silent for long. Returns whether the name
-- is the asker's. Nodes that hold nothing beat less often than their lease says.
local IDLE_SECONDS = 60
local node, key, now = ARGV[1], ARGV[2], ARGV[3]
local owner = redis.call('HGET', owners, node)
if owner == key then
  return 1
end
local beat = redis.call('ZSCORE', seen, node)
if owner and beat then
  local state = redis.call('HGET', nodes, node)
  local lease = state and cmsgpack.unpack(state)[2].lease_seconds or 0
  if ARGV[4] ~= '1' or now - beat <= math.max(lease, IDLE_SECONDS) then
    return 0
  end
end
redis.call('HSET', owners, node, key)
return 1
