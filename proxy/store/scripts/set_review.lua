-- ARGV: the flag and the note, each '' for none. Returns {'ok', snapshot} or {'missing'}.
if not status() then
  return {'missing'}
end
for at, name in ipairs({'flag', 'note'}) do
  if ARGV[at] == '' then
    redis.call('HDEL', KEYS[1], name)
  else
    redis.call('HSET', KEYS[1], name, ARGV[at])
  end
end
return {'ok', snapshot()}
