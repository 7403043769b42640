-- ARGV: tokens. No-op when the session is gone.
go_on_when_full()
if status() then
  redis.call('HSET', KEYS[1], 'sampled_tokens', ARGV[1])
end
