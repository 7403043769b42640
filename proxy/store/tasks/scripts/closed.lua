-- ARGV: task, index.
if redis.call('ZREM', closing, ARGV[1] .. ':' .. ARGV[2]) == 1 then
  redis.call('HINCRBY', task_key(ARGV[1]), 'unclosed', -1)
end
return 1
