"""Advantages of rows from the rewards of their group: pure functions on numpy arrays.

An estimator takes `rewards`, `group_index` and `rollout_index`, all of shape (rows,), as `Batch.advantages` passes them, and returns
float32 of shape (rows,). A rollout with several rows counts once in its group's baseline and spread, with the mean of its rows'
rewards; each row's advantage uses its own reward. A rollout alone in its group gets 0. A reward that is not finite raises
ValueError: the caller must leave out rows without a reward.

    batch.advantages(grpo)
    batch.advantages(agent_wise(grpo, agent_names(batch.rows)))                     # Dr. MAS
    batch.advantages(among(grpo, kept))                                             # GRPO-RoC, `kept` by resample_on_correct

Advantages per turn instead of per row: turns.py (MT-GRPO, IPA, CLEANER), entropy.py (AEM) and forks.py (VinePPO, A³; pivots as in ARPO,
Agent-R and R³L).
"""

from trainer_client.advantages.entropy import mean_entropy, modulate, turn_entropy
from trainer_client.advantages.forks import Vine, branch_gains, find_first_failure, find_uncertain, vine
from trainer_client.advantages.outcome import (
    Advantages,
    Estimator,
    agent_names,
    agent_wise,
    among,
    dr_grpo,
    format_penalty,
    grpo,
    leave_one_out,
    reinforce,
    resample_on_correct,
    tool_error_penalty,
)
from trainer_client.advantages.turns import Turns, find_failed, purify, turn_level, turn_returns, turns_of

__all__ = [
    "Advantages",
    "Estimator",
    "Turns",
    "Vine",
    "agent_names",
    "agent_wise",
    "among",
    "branch_gains",
    "dr_grpo",
    "find_failed",
    "find_first_failure",
    "find_uncertain",
    "format_penalty",
    "grpo",
    "leave_one_out",
    "mean_entropy",
    "modulate",
    "purify",
    "reinforce",
    "resample_on_correct",
    "tool_error_penalty",
    "turn_entropy",
    "turn_level",
    "turn_returns",
    "turns_of",
    "vine",
]
