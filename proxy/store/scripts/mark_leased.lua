-- ARGV: now
if status() then
  redis.call('HSETNX', KEYS[1], 'leased', ARGV[1])
end
return snapshot()
