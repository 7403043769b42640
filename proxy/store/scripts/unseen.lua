-- ARGV: latest time, limit. Returns session ids.
return redis.call('ZRANGEBYSCORE', unseen, '-inf', ARGV[1], 'LIMIT', 0, ARGV[2])
