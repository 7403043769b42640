-- ARGV: now, or '' for Redis's time
go_on_when_full()
if status() then
  redis.call('HSETNX', KEYS[1], 'leased', clock(ARGV[1]))
end
return snapshot()
