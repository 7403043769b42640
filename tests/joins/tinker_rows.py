"""Leased rows as tinker's data, beside what tinker-cookbook makes of the same calls. Prints the sums as JSON."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import httpx
import numpy as np
import tinker
from tinker_cookbook.completers import TokensWithLogprobs
from tinker_cookbook.rl.data_processing import assemble_training_data, compute_advantages
from tinker_cookbook.rl.types import Trajectory, TrajectoryGroup, Transition

from trainer_client import TrainerClient
from trainer_client.adapters.tinker import datums
from trainer_client.advantages import dr_grpo

URL, TOKEN = os.environ["VERBATIM_URL"], os.environ["VERBATIM_ADMIN_TOKEN"]


def calls_of(row: Any) -> list[dict[str, Any]]:
    answer = httpx.get(f"{URL}/sessions/{row.session_id}/calls", headers={"Authorization": f"Bearer {TOKEN}"}, timeout=60)
    calls = {call["call_id"]: call for call in answer.json()["calls"]}
    return [calls[call_id] for call_id in row.call_ids]


def as_trajectory(row: Any) -> Trajectory:
    calls = calls_of(row)
    transitions = [
        Transition(
            ob=tinker.ModelInput.from_ints(call["prompt_ids"]),
            ac=TokensWithLogprobs(tokens=call["completion_ids"], maybe_logprobs=call["logprobs"], stop_reason="stop"),
            reward=0.0,
            episode_done=call is calls[-1],
        )
        for call in calls
    ]
    return Trajectory(transitions=transitions, final_ob=tinker.ModelInput.empty())


def main() -> None:
    with TrainerClient(URL, TOKEN) as client, client.lease(max_groups=9) or sys.exit("nothing is leased") as batch:
        own = datums(batch, tinker, batch.advantages(dr_grpo))
        groups = [
            TrajectoryGroup(
                [as_trajectory(row) for row in group.trajectories],
                [float(row.reward or 0) for row in group.trajectories],
                [{} for _ in group.trajectories],
            )
            for group in batch.groups
        ]
        theirs, _ = assemble_training_data(groups, compute_advantages(groups))
        assert len(own) == len(theirs) == len(batch.rows)
        for mine, other in zip(own, theirs, strict=True):
            assert mine.model_input.to_ints() == other.model_input.to_ints()
            assert mine.loss_fn_inputs.keys() == other.loss_fn_inputs.keys()
            for name, array in mine.loss_fn_inputs.items():
                expected = other.loss_fn_inputs[name]
                assert (array.dtype, array.shape) == (expected.dtype, expected.shape), name
                np.testing.assert_array_equal(array.to_numpy(), expected.to_numpy())
        trained = sum(int(each.loss_fn_inputs["mask"].to_numpy().sum()) for each in own)
        sys.stdout.write(json.dumps({"data": len(own), "trained": trained}) + "\n")


if __name__ == "__main__":
    main()
