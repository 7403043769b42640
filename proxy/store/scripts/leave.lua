-- ARGV: consumer, whose claim ends.
return redis.call('HDEL', claims, ARGV[1])
