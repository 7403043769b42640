-- KEYS: state and calls of each session. Returns, of each, a text that changes with what lists show of it; '' if there is none.
local found = {}
for i = 1, #KEYS, 2 do
  local created, status, updated, flag = unpack(redis.call('HMGET', KEYS[i], 'created_at', 'status', 'updated_at', 'flag'))
  if status then
    local sizes = {redis.call('LLEN', KEYS[i + 1]), redis.call('HLEN', KEYS[i]), redis.call('HSTRLEN', KEYS[i], 'accounting')}
    found[#found + 1] = table.concat({created or '', status, updated or '', flag or '', sizes[1], sizes[2], sizes[3]}, ' ')
  else
    found[#found + 1] = ''
  end
end
return found
