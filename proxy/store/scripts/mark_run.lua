-- ARGV: run, now, whether it is over, whether it is hidden. Returns 0 for a run that there is not.
local record = load_packed(runs, ARGV[1])
if not record then
  return 0
end
record.ended_at = ARGV[3] == '1' and (record.ended_at or tonumber(ARGV[2])) or nil
record.hidden = ARGV[4] == '1'
redis.call('HSET', runs, ARGV[1], cmsgpack.pack(record))
return 1
