-- KEYS: state, calls, delivered. ARGV: call ids. Not for a deleted session, or the key would stay.
if status() then
  redis.call('SADD', KEYS[3], unpack(ARGV))
end
return 1
