"""Faults in what a trainer imports: arrays, advantages, leases and versions."""

from __future__ import annotations

from tests.mutants.fault import Fault

_BATCH = "tests/trainer_client/test_batch.py"
_CLIENT = (
    "tests/trainer_client/test_client.py "
    "-k 'acknowledged or given_back or lost_lease or extended or breaks_a_rule or twice or explicit or hidden'"
)
_ADVANTAGES = "tests/trainer_client/test_advantages.py"
_IMPORTANCE = "tests/trainer_client/test_importance.py"

FAULTS = (
    Fault(
        "Padded batches have a loss mask that stands one token late: every row trains on its prompt's end and misses its own.",
        "        loss_mask=rectangle(False, np.bool_, lambda row: row.loss_mask),\n",
        "        loss_mask=rectangle(False, np.bool_, lambda row: np.roll(row.loss_mask, 1)),\n",
        _BATCH,
    ),
    Fault(
        "Packed batches have logprobs that stand one token early.",
        "        inference_logprobs=line(np.float32, lambda row: row.logprobs),\n",
        "        inference_logprobs=line(np.float32, lambda row: np.roll(row.logprobs, -1)),\n",
        _BATCH,
    ),
    Fault(
        "Packed rows see the end of the row before: their positions do not begin at 0.",
        "        position_ids=line(np.int64, lambda row: np.arange(len(row.token_ids))),\n",
        "        position_ids=line(np.int64, lambda row: np.arange(len(row.token_ids)) + 1),\n",
        _BATCH,
    ),
    Fault(
        "Rows that are too long are cut without a word.",
        "        if limit is not None and len(row.token_ids) > limit and not truncate:\n",
        "        if limit is not None and len(row.token_ids) > 2 * limit and not truncate:\n",
        _BATCH,
    ),
    Fault(
        "Micro-batches take the advantages of other rows.",
        '        taken["advantages"] = per_row[at]\n',
        '        taken["advantages"] = per_row[: len(at)]\n',
        _BATCH,
    ),
    Fault(
        "A row without a reward counts as one that failed.",
        "np.nan if row.reward is None else row.reward for row in rows",
        "0.0 if row.reward is None else row.reward for row in rows",
        _BATCH,
    ),
    Fault(
        "The staleness a trainer sees is that of a row's newest token instead of its oldest.",
        "    return weight_version - min((span.version for span in row.weight_versions), default=weight_version)\n",
        "    return weight_version - max((span.version for span in row.weight_versions), default=weight_version)\n",
        "tests/trainer_client/test_batch.py tests/trainer_client/test_policies.py",
    ),
    Fault(
        "Advantages have the wrong sign: the policy learns to fail.",
        "    return table.of_rows(table.row_reward - table.by_row(mean), table.by_row(spread) + epsilon)\n",
        "    return table.of_rows(table.by_row(mean) - table.row_reward, table.by_row(spread) + epsilon)\n",
        _ADVANTAGES,
    ),
    Fault(
        "A rollout that became several rows counts several times in its group's mean.",
        "        reward = np.bincount(rollouts, weights=row_reward) / np.bincount(rollouts)\n",
        "        reward = np.bincount(rollouts, weights=row_reward)\n",
        _ADVANTAGES,
    ),
    Fault(
        "Leave-one-out compares a rollout with itself, too.",
        "    baseline = (table.group_sum(table.reward)[table.group] - table.reward) / others\n",
        "    baseline = table.group_sum(table.reward)[table.group] / others\n",
        _ADVANTAGES,
    ),
    Fault(
        "Importance ratios are upside down.",
        "    return np.asarray(ours - theirs, dtype=np.float64)\n",
        "    return np.asarray(theirs - ours, dtype=np.float64)\n",
        _IMPORTANCE,
    ),
    Fault(
        "A batch is acknowledged though the training step raised: its rows are lost.",
        "            if error is None:\n                self.ack()\n            else:\n                self.give_back_after(error)\n",
        "            self.ack()\n",
        _CLIENT,
    ),
    Fault(
        "A lease runs out while a long step is still at work on its batch.",
        "            self._open.enter_context(Keeper(self))\n",
        "            pass\n",
        _CLIENT,
    ),
    Fault(
        "A lease that was lost passes for acknowledged, and the batch is trained twice.",
        "            if error.status not in (404, 409):\n                raise\n",
        "            return self._service.request('GET', '/healthz')\n",
        _CLIENT,
    ),
    Fault(
        "One row that comes twice in a batch is trained twice.",
        "            if row.trajectory_id in self._names:\n",
        "            if row.trajectory_id in ():\n",
        _CLIENT,
    ),
    Fault(
        "verl gets the reward at a token of the prompt's padding instead of the response's last one.",
        "    line[-1] = value\n    return line\n",
        "    line[0] = value\n    return line\n",
        "tests/trainer_client/adapters/test_recorded.py tests/trainer_client/adapters/test_verl.py -k 'verl or reward'",
    ),
    Fault(
        "The check against the model compares each logprob with that of the next token.",
        "chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, 1:, None])[:, 0]\n",
        "chosen = torch.log_softmax(logits, dim=-1).gather(1, ids[0, :-1, None])[:, 0]\n",
        "tests/trainer_client/test_recompute.py",
    ),
)
