-- KEYS: state, calls, delivered. ARGV: call ids. A deleted session must not leave a key behind.
if status() then
  redis.call('SADD', KEYS[3], unpack(ARGV))
end
return 1
