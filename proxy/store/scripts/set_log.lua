-- KEYS: state, log. ARGV: the text. Returns 1, or 0 if there is no such session.
if redis.call('EXISTS', KEYS[1]) == 0 then return 0 end
redis.call('SET', KEYS[2], ARGV[1])
return 1
