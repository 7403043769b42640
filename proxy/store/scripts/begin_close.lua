-- ARGV: now
go_on_when_full()
if status() == 'open' then
  redis.call('HSET', KEYS[1], 'status', 'closing', 'updated_at', ARGV[1])
end
return snapshot()
