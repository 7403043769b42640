"""Faults in what is stored, in how groups are delivered, and in the line of weight versions."""

from __future__ import annotations

from tests.mutants.fault import Fault

_SESSIONS = "tests/proxy/store/test_sessions.py"
_DELIVERY = "tests/proxy/store/test_delivery.py"
_RULES = "tests/proxy/store/test_delivery_rules.py"
_WEIGHTS = "tests/proxy/store/test_weights.py"
_RUN = "tests/proxy/store/test_run.py"
_RETENTION = (
    "tests/proxy/archive/test_retention.py -k 'may_still or nobody_waits or until_it_is_old or old_sessions or what_holds'"
)

FAULTS = (
    # Sessions
    Fault(
        "A call that finishes after its session was closed is written into it, behind the back of whoever trains on it.",
        "if #fresh > 0 and frozen(now) then\n",
        "if #fresh > 0 and now == 'deleted' then\n",
        _SESSIONS,
    ),
    Fault(
        "A record of a call that was recorded before with other content is taken without a word.",
        "  elseif digest ~= ARGV[i + 1] then\n    return {'conflict', ARGV[i]}\n  end\nend\nif #fresh",
        "  end\nend\nif #fresh",
        _SESSIONS,
    ),
    Fault(
        "A commit that is sent twice records the call twice.",
        "  if not digest then\n    fresh[#fresh + 1] = i\n  elseif",
        "  if true then\n    fresh[#fresh + 1] = i\n  elseif",
        _SESSIONS,
    ),
    Fault(
        "The intent stays behind when its call was recorded: every call looks as if it was lost.",
        "redis.call('HDEL', KEYS[4], ARGV[2])\nnote_answers",
        "note_answers",
        _SESSIONS,
    ),
    Fault(
        "A call may begin while its session is being closed, and is recorded nowhere.",
        "if now == 'open' and known == calls then\n",
        "if known == calls then\n",
        _SESSIONS,
    ),
    Fault(
        "A call does not hear of what other processes recorded meanwhile, and begins a second root.",
        "end\nreturn {now, 0, redis.call('LRANGE', KEYS[2], known, -1)}\n",
        "end\nreturn {now, 0, redis.call('LRANGE', KEYS[2], known + 1, -1)}\n",
        _SESSIONS,
    ),
    Fault(
        "A reward can be changed after a trainer was given the rows.",
        "if redis.call('HEXISTS', KEYS[1], 'leased') == 1 then\n",
        "if redis.call('HEXISTS', KEYS[1], 'handed_out') == 1 then\n",
        _SESSIONS,
    ),
    Fault(
        "A session that was closed as failed can be closed again as completed.",
        "  if now ~= ARGV[1] then\n    return {'frozen', now}\n  end\n  redis.call",
        "  redis.call",
        _SESSIONS,
    ),
    Fault(
        "A write that no replica has is called durable.",
        "        if synced < 1 or replicas < self._wait_replicas:\n",
        "        if synced < 1:\n",
        "tests/proxy/store/test_cluster.py -k 'waits_for_the_replicas'",
    ),
    Fault(
        "A reply that arrives after its session was closed changes the rows that its group has counted.",
        "    if redis.call('HDEL', answering, ARGV[i]) == 1 and ARGV[i + 1] == '1' then\n",
        "    if ARGV[i + 1] == '1' then\n",
        "tests/proxy/store/test_answers.py -k 'after_the_close or later_session'",
    ),
    Fault(
        "A session is closed before another process has told that its replies were delivered: they pass for replaced attempts.",
        '        return {intent.process for intent in under_way} | {process.decode() for process in processes} - {""}\n',
        '        return {intent.process for intent in under_way} - {""}\n',
        "tests/proxy/call/test_lifecycle.py -k 'counts_every_reply'",
    ),
    # Delivery
    Fault(
        "A group is delivered with a member missing.",
        "    if #usable < group.size then\n      return 'filling'\n",
        "    if #usable < group.size - 1 then\n      return 'filling'\n",
        _DELIVERY,
    ),
    Fault(
        "Members that failed are delivered with the others.",
        "    if member.usable then\n      usable[#usable + 1] = member\n    end\n",
        "    usable[#usable + 1] = member\n",
        _DELIVERY,
    ),
    Fault(
        "A group that was acknowledged is delivered again.",
        "  finish(ref, load_packed(groups, ref), 'acked')\n",
        "  move(ref, load_packed(groups, ref), 'ready')\n",
        _DELIVERY,
    ),
    Fault(
        "A lease that expired can still be acknowledged, while another trainer works on its group.",
        "  if lease.status ~= 'active' then\n    return nil, {lease.status, group_ids(lease)}\n  end\n",
        "",
        _DELIVERY,
    ),
    Fault(
        "A lease never expires: the groups of a trainer that died are never trained.",
        "  for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', now)) do\n",
        "  for _, lease_id in ipairs(redis.call('ZRANGEBYSCORE', deadlines, '-inf', 0)) do\n",
        _DELIVERY,
    ),
    Fault(
        "A lease that is extended runs out all the same.",
        "redis.call('ZADD', deadlines, ARGV[2], ARGV[1])\n",
        "redis.call('ZADD', deadlines, 'NX', ARGV[2], ARGV[1])\n",
        _DELIVERY,
    ),
    Fault(
        "Two trainers are given the same group.",
        "  move(ref, group, 'leased')\n  return ref\n",
        "  group.status = 'leased'\n  save_group(ref, group)\n  return ref\n",
        _DELIVERY,
    ),
    Fault(
        "A group that kills every trainer is delivered for ever.",
        "    elseif group.deliveries >= max_deliveries then\n",
        "    elseif group.deliveries > 1000 * max_deliveries then\n",
        _DELIVERY,
    ),
    Fault(
        "The staleness of a group goes by its newest member instead of its oldest.",
        "  part.rows, part.oldest = part.rows + rows, math.min(part.oldest, oldest)\n",
        "  part.rows, part.oldest = part.rows + rows, math.max(part.oldest, oldest)\n",
        _DELIVERY,
    ),
    Fault(
        "Rows older than a trainer takes are given to it.",
        "    if part.oldest < (claim.oldest[policy] or -1) then\n",
        "    if part.oldest + 1 < (claim.oldest[policy] or -1) then\n",
        _DELIVERY,
    ),
    Fault(
        "A session is deleted while a trainer holds it.",
        "  if part and part.status == 'leased' then\n    return 'leased'\n",
        "  if part and part.status == 'lost' then\n    return 'leased'\n",
        _DELIVERY,
    ),
    Fault(
        "A session that is filled in twice counts twice, and its group is whole with a member missing.",
        "    if old.id == session_id then\n      group.members[i] = member\n    end\n",
        "    if old.id == session_id then\n      group.members[#group.members + 1] = member\n      break\n    end\n",
        _DELIVERY,
    ),
    Fault(
        "A group whose rewards are all equal is delivered where it should be dropped.",
        "    if member.reward ~= usable[1].reward then\n      return false\n",
        "    if member.reward == usable[1].reward then\n      return false\n",
        _DELIVERY,
    ),
    Fault(
        "A close that a crash cut short is never finished: its group waits for ever.",
        "redis.call('ZADD', announced, ARGV[2], ARGV[1])\n",
        "",
        _DELIVERY,
    ),
    Fault(
        "A group given back because its caller had gone counts as delivered, and dies after a few.",
        "    group.deliveries = group.deliveries - 1\n",
        "    group.deliveries = group.deliveries\n",
        _RULES,
    ),
    Fault(
        "Rollouts go on however many groups lie undelivered.",
        "local refused = limit > 0 and waiting >= limit and 'refused'",
        "local refused = limit > 0 and waiting > 2 * limit and 'refused'",
        _RULES,
    ),
    # Weights
    Fault(
        "A weight version that is older than the current one becomes current.",
        "if tonumber(ARGV[1]) <= version then\n",
        "if tonumber(ARGV[1]) == version then\n",
        _WEIGHTS,
    ),
    Fault(
        "A process that was stopped in the middle of a push makes its version current after another took over.",
        "if fence > 0 and tonumber(redis.call('GET', KEYS[3]) or 0) ~= fence then\n",
        "if fence < 0 and tonumber(redis.call('GET', KEYS[3]) or 0) ~= fence then\n",
        _WEIGHTS,
    ),
    Fault(
        "Two pushes run at once and interleave.",
        "local owner = redis.call('GET', KEYS[1])\nif owner and owner ~= ARGV[1] then\n  return 0\nend\nlocal last",
        "local owner = redis.call('GET', KEYS[1])\nlocal last",
        _WEIGHTS,
    ),
    Fault(
        "The push lock is given back by a process that does not hold it.",
        "if redis.call('GET', KEYS[1]) == ARGV[1] then\n  return redis.call('DEL', KEYS[1])\n",
        "if redis.call('GET', KEYS[1]) ~= '' then\n  return redis.call('DEL', KEYS[1])\n",
        _WEIGHTS,
    ),
    # Retention
    Fault(
        "Retention deletes sessions whose group was not acknowledged yet.",
        '        if standing in ("acked", "dropped"):\n',
        '        if standing in ("acked", "dropped", "ready"):\n',
        _RETENTION,
    ),
    Fault(
        "Retention deletes the sessions of dead groups, which somebody may want to deliver again.",
        '        if standing not in ("none", "filling"):\n            return False\n',
        '        if standing not in ("none", "filling"):\n            return standing == "dead"\n',
        _RETENTION,
    ),
    Fault(
        "Retention deletes sessions before they are old.",
        "                if excess <= 0 and not is_old:\n                    continue\n",
        "",
        _RETENTION,
    ),
    # The numbers of the run
    Fault(
        "A session whose close is repeated counts twice in the numbers of the run.",
        "  uncount_session(session_id)\n  for _, entry in ipairs(entries) do\n",
        "  for _, entry in ipairs(entries) do\n",
        _RUN,
    ),
    Fault(
        "A group counts once more whenever one of its members is filled again.",
        "  for _, entry in ipairs(group.judged or {}) do\n    count_entry(entry, -1)\n  end\n",
        "",
        _RUN,
    ),
    Fault(
        "A full curve forgets its newest cell instead of its oldest.",
        "table.remove(starts, 1)",
        "table.remove(starts)",
        _RUN,
    ),
    Fault(
        "A session filled again after it was deleted counts twice in the numbers of the run.",
        "if ARGV[5] == '1' then\n  uncount_session(session_id)\nelse\n",
        "if ARGV[5] ~= '' then\n",
        _RUN,
    ),
    # Archives
    Fault(
        "An export loses a trajectory of every session that has several.",
        '        "trajectories": [_trajectory_row(row, session.state) for row in session.trajectories],\n',
        '        "trajectories": [_trajectory_row(row, session.state) for row in session.trajectories[:1]],\n',
        "tests/proxy/archive/test_archive.py -k 'one_row_for_each'",
    ),
    Fault(
        "An archive whose files were changed is imported.",
        '        if not path.is_file() or digest_of(path) != entry["sha256"]:\n',
        "        if not path.is_file():\n",
        "tests/proxy/archive/test_archive.py -k 'was_changed'",
    ),
)
