-- ARGV: session id, admitted and now known to exist.
return redis.call('ZREM', unseen, ARGV[1])
