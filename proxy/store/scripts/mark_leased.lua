-- ARGV: now
go_on_when_full()
if status() then
  redis.call('HSETNX', KEYS[1], 'leased', ARGV[1])
end
return snapshot()
