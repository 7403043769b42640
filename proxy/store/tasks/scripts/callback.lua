-- ARGV: task, now, the outcome (delivered, failed or given_up), when it is tried again or '', error or ''.
local task, now, became = ARGV[1], ARGV[2], ARGV[3]
local key = task_key(task)
if redis.call('EXISTS', key) == 0 or redis.call('HEXISTS', key, 'callback_at') == 1 then
  redis.call('ZREM', callbacks, task)
  return 0
end
local tries = redis.call('HINCRBY', key, 'callback_tries', 1)
redis.call('HDEL', key, 'callback_next', 'callback_error')
if ARGV[5] ~= '' then
  redis.call('HSET', key, 'callback_error', ARGV[5])
end
if became == 'failed' then
  redis.call('HSET', key, 'callback_next', ARGV[4])
  redis.call('ZADD', callbacks, ARGV[4], task)
else
  redis.call('ZREM', callbacks, task)
end
if became == 'delivered' then
  redis.call('HSET', key, 'callback_at', now)
end
tally('callback:' .. became)
emit(task, now, 'callback.' .. became, {tries = tries, error = ARGV[5] ~= '' and ARGV[5] or nil})
return 1
