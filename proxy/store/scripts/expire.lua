-- KEYS: state, calls, intents. ARGV: latest activity of an idle open session, the same for one left half closed, how many intents
-- the caller knows, none in flight; now or ''. Returns 1 to the one caller that must close the session.
go_on_when_full()
local now = status()
local latest = now == 'open' and ARGV[1] or now == 'closing' and ARGV[2]
if not latest or tonumber(redis.call('HGET', KEYS[1], 'updated_at')) > tonumber(latest) then
  return 0
end
if redis.call('HLEN', KEYS[3]) ~= tonumber(ARGV[3]) then
  return 0 -- a call began meanwhile
end
redis.call('HSET', KEYS[1], 'status', 'closing', 'updated_at', clock(ARGV[4]))
return 1
