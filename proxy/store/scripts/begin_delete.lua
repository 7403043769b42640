-- KEYS: state and forks. From here on no fork of the session is opened. Returns 0 while it has some.
go_on_when_full()
if redis.call('ZCARD', KEYS[2]) > 0 then
  return 0
end
if status() then
  redis.call('HSET', KEYS[1], 'deleting', '1')
end
return 1
