-- ARGV: node.
redis.call('HDEL', nodes, ARGV[1])
redis.call('HDEL', takes, ARGV[1])
redis.call('HDEL', owners, ARGV[1])
redis.call('ZREM', seen, ARGV[1])
return 1
