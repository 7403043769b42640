"""Faults in rollouts: attempts, verdicts, rewards, and the sandboxes agents work in; and in the commands."""

from __future__ import annotations

from tests.mutants.fault import Fault

_STORE = "tests/proxy/store/tasks/test_store.py"
_NODE = "tests/rollout/test_node.py -k "
_LOCAL = "tests/rollout/runtimes/test_contract.py -k "
_REWARDS = "tests/rollout/evaluators/test_catalogue.py tests/rollout/evaluators/test_command.py"

FAULTS = (
    # Rewards
    Fault(
        "An evaluation that gave nothing of use counts as a reward of nan.",
        "    if not math.isfinite(reward):\n",
        "    if math.isinf(reward):\n",
        _REWARDS,
    ),
    Fault(
        "True and false are taken for rewards.",
        "    if isinstance(value, bool) or not isinstance(value, Real):\n",
        "    if not isinstance(value, Real):\n",
        _REWARDS,
    ),
    Fault(
        "A score without a reward counts as a failure of the agent.",
        '    if value.get("reward") is None:\n',
        '    value = {"reward": 0.0, **value}\n    if value.get("reward") is None:\n',
        _REWARDS,
    ),
    Fault(
        "The reward of an evaluation that failed is 0 instead of none.",
        '            raise RolloutFailed(Failure.BAD_REWARD, str(error), self._logs.place("evaluate.out")) from error\n',
        "            return parse_score(0.0, str(error))\n",
        _NODE + "'every_failure'",
    ),
    Fault(
        "An agent that never called the model is scored and trained on.",
        "    if not calls:\n        raise RolloutFailed(Failure.NO_CALLS,",
        "    if calls is None:\n        raise RolloutFailed(Failure.NO_CALLS,",
        _NODE + "'every_failure'",
    ),
    Fault(
        "A harness that crashed is scored as if it had ended.",
        "    if done.exit_code > SIGNALLED and not done.timed_out:\n",
        "    if done.exit_code > 2 * SIGNALLED and not done.timed_out:\n",
        _NODE + "'every_failure'",
    ),
    Fault(
        "An agent whose last call the engine failed is punished for it.",
        "    if (failed := find_unserved(calls, session)) is not None:\n",
        "    if (failed := find_unserved(calls, session)) is not None and last is None:\n",
        "tests/rollout/test_faults.py -k 'engine_failed_is_tried_again'",
    ),
    # Attempts
    Fault(
        "A node that was taken for dead closes a rollout that another node runs by now.",
        "  if found[1] ~= attempt or (node ~= '' and found[2] ~= node) then\n",
        "  if node ~= '' and found[2] ~= node then\n",
        _STORE,
    ),
    Fault(
        "A rollout of a node that died is never run again.",
        "      if pending[3] >= lease_of(pending[2]) then\n",
        "      if pending[3] >= 1000 * lease_of(pending[2]) + 3600000 then\n",
        _STORE,
    ),
    Fault(
        "A rollout is taken away from a node that lives.",
        "    redis.call('XCLAIM', queue_key(place[1]), GROUP, node, 0, place[2], 'JUSTID')\n  else\n",
        "  else\n",
        _STORE,
    ),
    Fault(
        "A second verdict replaces the first, with which the session may have been closed.",
        "if was ~= 'concluding' then\n  redis.call('HSET', rollout_key(task, index), 'verdict',",
        "if true then\n  redis.call('HSET', rollout_key(task, index), 'verdict',",
        _STORE,
    ),
    Fault(
        "A rollout whose verdict stands is run once more when its node dies.",
        "  if status == 'concluding' then\n    redis.call('XCLAIM',",
        "  if status == 'concluded' then\n    redis.call('XCLAIM',",
        _STORE,
    ),
    Fault(
        "A task that cannot succeed is tried for ever.",
        "if attempts_left(task, key) <= 0 then\n  return 'over'\n",
        "if attempts_left(task, key) < -1000 then\n  return 'over'\n",
        _STORE,
    ),
    Fault(
        "A request whose answer was lost takes a second rollout, and nobody runs the first.",
        "  if token ~= ARGV[5] then\n    return nil\n",
        "  if token ~= nil then\n    return nil\n",
        _STORE,
    ),
    Fault(
        "A cancelled task's rollouts go on in their sandboxes.",
        "                _cancel(self._courses[lost][1])\n",
        "                pass\n",
        _NODE + "'cancelled_rollout'",
    ),
    Fault(
        "After an outage of all services the first node that asks robs the others.",
        "            lease = lease_seconds if self.may_recover(lease_seconds) else NEVER_SECONDS\n",
        "            lease = lease_seconds\n",
        "tests/proxy/tasks/test_takes.py -k 'robbed'",
    ),
    Fault(
        "A node's token opens the session of a rollout that another node has.",
        "        held = state is not None and (state.attempt, state.node) == (attempt.attempt, self._node)\n",
        "        held = state is not None and state.attempt == attempt.attempt\n",
        "tests/rollout/test_introduction.py -k 'nodes_token'",
    ),
    Fault(
        "A node takes more rollouts than it has memory for.",
        "        self.free_memory_mb += memory_mb\n",
        "        self.free_memory_mb += max(0, memory_mb)\n",
        "tests/rollout/test_stages.py",
    ),
    # Sandboxes
    Fault(
        "An agent that should reach the proxy alone has the whole network.",
        '        words += ["--share-net"] if network else []\n',
        '        words += ["--share-net"]\n',
        _LOCAL + "'bwrap and nothing_else'",
    ),
    Fault(
        "An agent sees the environment of the node: its tokens and keys.",
        "        env = merge_variables(self._get_environment(), command.env)\n",
        "        env = merge_variables(os.environ, self._get_environment(), command.env)\n",
        _LOCAL + "'bwrap and do_not'",
    ),
    Fault(
        "What a harness leaves running goes on, and calls a session that is closed.",
        "would keep the terminal, and call a closed session.\n        self._signal(signal.SIGKILL)\n",
        "would keep the terminal, and call a closed session.\n",
        "tests/rollout/harnesses/test_process.py -k 'ends_with_it'",
    ),
    Fault(
        "An archive that an agent made writes outside of where it is unpacked.",
        '    if name.startswith("/") or ".." in name.split("/"):\n',
        "    if False:\n",
        _LOCAL + "'bwrap and leads_out'",
    ),
    Fault(
        "A command in a sandbox makes namespaces, and mounts memory that nothing counts.",
        '            words += ["--seccomp", str(passed[-1])]\n',
        "",
        "tests/rollout/runtimes/test_seccomp.py -k 'namespaces'",
    ),
    Fault(
        "Files in memory that no process has mapped count for nothing.",
        " + sum(files.values())\n",
        "\n",
        "tests/rollout/runtimes/local/test_local.py -k 'counts_once'",
    ),
    Fault(
        "A step with the network has the node's own.",
        '    paths = [(f"/proc/{network_pid}/ns/net", CLONE_NEWNET), *(',
        "    paths = [*(",
        "tests/rollout/runtimes/container/test_container_hardening.py -k 'not_the_nodes'",
    ),
    Fault(
        "A secret of the caller reaches the harness.",
        '    r"|(?:.*_)?(?:API_?KEY|TOKEN|SECRET|PASSWORD|ACCESS_KEY|CREDENTIALS)"\n',
        "",
        "tests/rollout/harnesses/test_definitions.py -k 'withheld'",
    ),
    Fault(
        "A command that was killed for its many files seems to have been killed by somebody.",
        "        if not self._exceeded:\n            return done\n",
        "        if self is not None:\n            return done\n",
        _LOCAL + "'bwrap and too_large_together'",
    ),
)
