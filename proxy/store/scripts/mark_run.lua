-- ARGV: run, now, whether it is over, whether it is hidden: '1', '0', or '' to leave that. Returns 0 for a run that there is not.
local record = load_packed(runs, ARGV[1])
if not record then
  return 0
end
if ARGV[3] ~= '' then
  record.ended_at = ARGV[3] == '1' and (record.ended_at or tonumber(ARGV[2])) or nil
end
if ARGV[4] ~= '' then
  record.hidden = ARGV[4] == '1'
end
redis.call('HSET', runs, ARGV[1], cmsgpack.pack(record))
return 1
