-- KEYS: cuts. ARGV: session id, how many are kept. A full Redis refuses the first write of a script, but no trimming.
redis.replicate_commands()
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[2])
redis.call('XADD', KEYS[1], '*', 's', ARGV[1])
return 1
