-- ARGV: consumer. Its claim ends.
return redis.call('HDEL', claims, ARGV[1])
