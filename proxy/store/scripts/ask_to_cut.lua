-- KEYS: cuts. ARGV: session id, entries to keep. Trims first: a full Redis refuses a script's first write, but not a trim.
redis.replicate_commands()
redis.call('XTRIM', KEYS[1], 'MAXLEN', '~', ARGV[2])
redis.call('XADD', KEYS[1], '*', 's', ARGV[1])
return 1
