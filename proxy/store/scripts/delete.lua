-- KEYS: all of the session's, its forks last. Returns how many were removed, or -1 while it has forks.
if redis.call('ZCARD', KEYS[#KEYS]) > 0 then
  return -1
end
return redis.call('DEL', unpack(KEYS))
