-- ARGV: session id. It was let in and is there.
return redis.call('ZREM', unseen, ARGV[1])
