-- ARGV: now, or '' for Redis's time
go_on_when_full()
if status() == 'open' then
  redis.call('HSET', KEYS[1], 'updated_at', clock(ARGV[1]))
end
return 1
