"""slime's (and miles') rollout function: each step is made of leased groups instead of calls to its own engines.

    export VERBATIM_URL=http://127.0.0.1:8700 VERBATIM_TRAINER_TOKEN=…
    python train.py --rollout-function-path examples.trainers.slime_rollout.generate_rollout \\
        --custom-reward-post-process-path trainer_client.adapters.slime.post_process_rewards \\
        --save /checkpoints --save-interval 1 --save-hf '/shared/weights/step-{rollout_id}' …

`--rollout-batch-size` groups make a step; the groups must be filled with `--n-samples-per-prompt` rollouts. Set
VERBATIM_STEPS_AHEAD=1 for `train_async.py`, which asks for a step before it trains on the last. What `--save-hf` wrote after a step is
published when the step is acknowledged; the last step's is left to `TrainerClient.publish(path, version)`.
"""

from __future__ import annotations

import os
from functools import cache
from typing import Any

from trainer_client import TrainerClient
from trainer_client.adapters.slime import samples
from trainer_client.adapters.steps import Steps


def generate_rollout(args: Any, rollout_id: int, data_source: Any, evaluation: bool = False) -> Any:
    """The samples of one step, as slime's RolloutFnTrainOutput."""
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.utils.types import Sample

    if evaluation:
        raise ValueError("the service has no evaluation set: leave --eval-interval out")
    batch = _steps(args.rollout_batch_size).take(_saved(args, rollout_id - 1 - _steps_ahead()))
    staleness = {"staleness_mean": float(batch.staleness.mean()), "staleness_max": int(batch.staleness.max())}
    return RolloutFnTrainOutput(samples=samples(batch, Sample), metrics=staleness)


@cache
def _steps(groups: int) -> Steps:
    client = TrainerClient(os.environ["VERBATIM_URL"], os.environ["VERBATIM_TRAINER_TOKEN"])
    return Steps(client, groups, behind=1 + _steps_ahead())


def _steps_ahead() -> int:
    return int(os.environ.get("VERBATIM_STEPS_AHEAD", "0"))


def _saved(args: Any, rollout_id: int) -> str | None:
    """What slime saved after that step of this run, if it saves any."""
    if not args.save_hf or rollout_id < args.start_rollout_id or (rollout_id + 1) % args.save_interval:
        return None
    return str(args.save_hf).format(rollout_id=rollout_id)
