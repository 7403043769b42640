-- After _delivery. The numbers of runs (proxy/store/run.py): what closed sessions and decided groups add up to, in cells.
-- An entry: {run, policy, label, cells = {axis = start}, numbers = {name = number}}; it is added to one cell per axis. `outcomes` keeps the
-- entries of every member that may still be filled again, so that a member filled again takes back what it had added.

-- Cells that each axis keeps of a curve, the newest. `all` is one cell that sums up everything.
local KEPT_CELLS = {version = 500, versions = 500, minute = 360, quarter = 672, hours = 730, all = 1}
-- Axes of 32 policies and labels in a run, of 320 in all.
local MOST_OF_A_RUN, MOST_CURVES = 32, 1920

local function curve_name(axis, entry)
  return axis .. '=' .. entry.run .. '=' .. entry.policy .. '=' .. entry.label
end

-- A new, empty cell; nil for one that is older than all that a full curve keeps.
local function open_cell(axis, curve, start)
  local packed = redis.call('HGET', curves, curve)
  local starts = packed and cmsgpack.unpack(packed) or {}
  if #starts >= KEPT_CELLS[axis] then
    if start < starts[1] then
      return nil
    end
    redis.call('HDEL', cells, string.format('%d', table.remove(starts, 1)) .. '=' .. curve)
  end
  starts[#starts + 1] = start
  table.sort(starts)
  redis.call('HSET', curves, curve, cmsgpack.pack(starts))
  return {}
end

-- Adds the entry to its cells, or takes it back with `sign` -1; a cell no longer kept stays away.
local function count_entry(entry, sign)
  for axis, start in pairs(entry.cells) do
    local curve = curve_name(axis, entry)
    local field = string.format('%d', start) .. '=' .. curve
    local packed = redis.call('HGET', cells, field)
    local sums = packed and cmsgpack.unpack(packed) or sign > 0 and open_cell(axis, curve, start)
    if sums then
      for name, number in pairs(entry.numbers) do
        sums[name] = (sums[name] or 0) + sign * number
      end
      redis.call('HSET', cells, field, cmsgpack.pack(sums))
    end
  end
end

-- Takes back what the session had added.
local function uncount_session(session_id)
  local packed = redis.call('HGET', outcomes, session_id)
  for _, entry in ipairs(packed and cmsgpack.unpack(packed) or {}) do
    count_entry(entry, -1)
  end
  redis.call('HDEL', outcomes, session_id)
end

-- The number of curves is bounded: further labels of a run share one.
local function bound_label(entry, record)
  if redis.call('HEXISTS', curves, curve_name('all', entry)) == 1 then
    return
  end
  if record.curves >= MOST_OF_A_RUN or redis.call('HLEN', curves) >= MOST_CURVES then
    entry.label = OTHER
  else
    record.curves = record.curves + 1
  end
end

-- Counts the session's entries, as those of this run, in place of those it had.
local function count_session(session_id, entries, run, now)
  uncount_session(session_id)
  local record = load_packed(runs, run)
  for _, entry in ipairs(entries) do
    entry.run = run
    bound_label(entry, record)
    count_entry(entry, 1)
  end
  record.at = now
  redis.call('HSET', runs, run, cmsgpack.pack(record))
  redis.call('HSET', outcomes, session_id, cmsgpack.pack(entries))
end

-- Counts a group that was decided just now, where its last usable member was counted: whether its rewards are all equal.
local function count_group(group, status)
  for _, entry in ipairs(group.judged or {}) do
    count_entry(entry, -1)
  end
  group.judged = nil
  local usable = usable_members(group)
  if #usable < 2 or (status ~= 'ready' and status ~= 'dropped') then
    return
  end
  local packed = redis.call('HGET', outcomes, usable[#usable].id)
  group.judged = packed and cmsgpack.unpack(packed) or {}
  for _, entry in ipairs(group.judged) do
    entry.numbers = {groups = 1, equal_groups = same_rewards(usable) and 1 or 0}
    count_entry(entry, 1)
  end
end
