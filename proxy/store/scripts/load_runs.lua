-- ARGV: runs (none: all of them). Returns of each that there is: its name, its packed record, and its states with their numbers in turn.
local answer, found = {}, {}
local names = #ARGV > 0 and ARGV or redis.call('HKEYS', runs)
for _, run in ipairs(names) do
  local packed = redis.call('HGET', runs, run)
  if packed and not found[run] then
    found[run] = {}
    answer[#answer + 1] = {run, packed, found[run]}
  end
end
local states = redis.call('HGETALL', run_groups)
for at = 1, #states, 2 do
  local run, state = string.match(states[at], '^(.-)=(.*)$')
  local kept = found[run]
  if kept then
    kept[#kept + 1] = state
    kept[#kept + 1] = tonumber(states[at + 1])
  end
end
return answer
