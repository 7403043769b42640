-- ARGV: reward or '', per_call, per_branch, reward_metadata, now or ''. Returns {'ok', snapshot}, {'leased'} or {'missing'}.
if not status() then
  return {'missing'}
end
if redis.call('HEXISTS', KEYS[1], 'leased') == 1 then
  return {'leased'}
end
if #ARGV[4] <= 65536 then
  go_on_when_full()
end
if ARGV[1] ~= '' then
  redis.call('HSET', KEYS[1], 'reward', ARGV[1])
end
redis.call('HSET', KEYS[1], 'per_call', ARGV[2], 'per_branch', ARGV[3], 'reward_metadata', ARGV[4], 'updated_at', clock(ARGV[5]))
return {'ok', snapshot()}
