-- KEYS: those of one session. Returns their bytes.
local bytes = 0
for _, key in ipairs(KEYS) do
  bytes = bytes + (redis.call('MEMORY', 'USAGE', key, 'SAMPLES', '0') or 0)
end
return bytes
