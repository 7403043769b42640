-- KEYS: bytes, holders. ARGV: the session, the bytes or ''. Returns 0 when the bytes are not there and were not given.
if ARGV[2] ~= '' then
  redis.call('SET', KEYS[1], ARGV[2], 'NX')
elseif redis.call('EXISTS', KEYS[1]) == 0 then
  return 0
end
redis.call('HSET', KEYS[2], ARGV[1], '') -- a repetition writes too: WAIT waits for the connection's last write
return 1
