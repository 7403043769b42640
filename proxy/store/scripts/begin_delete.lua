-- KEYS: state and forks. From here on no fork of the session is opened. Returns 0 while it has some.
redis.call('HDEL', KEYS[1], '') -- a full Redis never refuses it
if redis.call('ZCARD', KEYS[2]) > 0 then
  return 0
end
if redis.call('EXISTS', KEYS[1]) == 1 then
  redis.call('HSET', KEYS[1], 'deleting', '1')
end
return 1
