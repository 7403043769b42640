-- ARGV: latest time, limit. Session ids.
return redis.call('ZRANGEBYSCORE', unseen, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
