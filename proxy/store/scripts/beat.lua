-- KEYS: processes. ARGV: process, seconds it counts as alive without another beat. By the server's clock, the only one that all
-- processes share.
redis.replicate_commands()
local time = redis.call('TIME')
local now = tonumber(time[1]) + tonumber(time[2]) / 1e6
redis.call('ZREMRANGEBYSCORE', KEYS[1], '-inf', now - 3600)
redis.call('ZADD', KEYS[1], now + tonumber(ARGV[2]), ARGV[1])
return 1
