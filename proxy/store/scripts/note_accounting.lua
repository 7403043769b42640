-- ARGV: the accounting, packed. No-op when the session is gone.
go_on_when_full()
if status() then
  redis.call('HSET', KEYS[1], 'accounting', ARGV[1])
end
