-- KEYS: state, delivered. ARGV: call id
if status() == 'open' then
  redis.call('SADD', KEYS[2], ARGV[1])
end
return 1
