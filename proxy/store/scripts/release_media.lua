-- KEYS: bytes, holders. ARGV: the session. The last one that refers to the bytes takes them with it.
redis.call('HDEL', KEYS[2], ARGV[1])
if redis.call('HLEN', KEYS[2]) == 0 then
  redis.call('DEL', KEYS[1])
end
