"""Documents of ATIF that others wrote, as training rows. Harbor's own are in tests/joins."""

from __future__ import annotations

from typing import Any

import pytest

from trainer_client.integrations.atif import read_rows

SAID = {"weight_version": 3}


def step(number: int, prompt: list[int], completion: list[int], **more: Any) -> dict[str, Any]:
    metrics = {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": [-0.5] * len(completion)}
    return {"step_id": number, "source": "agent", "message": "", "metrics": metrics, **more}


def document(*steps: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": {"name": "a", "version": "1"}, "steps": [*steps], **more}


def test_a_step_that_goes_on_extends_its_row_and_any_other_begins_one() -> None:
    """[1 2|3] [1 2 3 4|5], then an edited history [1 9|6]."""
    user = {"step_id": 1, "source": "user", "message": "q"}
    whole = document(user, step(2, [1, 2], [3]), step(3, [1, 2, 3, 4], [5]), step(4, [1, 9], [6]))
    first, second = read_rows(whole, reward=1.0, **SAID)
    assert (first.token_ids.tolist(), first.loss_mask.tolist()) == ([1, 2, 3, 4, 5], [0, 0, 1, 0, 1])
    assert first.logprobs.tolist() == [0, 0, -0.5, 0, -0.5]
    assert second.token_ids.tolist() == [1, 9, 6]
    assert [(row.reward, row.row_weight) for row in (first, second)] == [(1.0, 0.5)] * 2
    assert [(span.version, span.start, span.end) for span in first.weight_versions] == [(3, 2, 3), (3, 4, 5)]


def test_copied_context_is_not_trained_again_and_sub_agents_are_rows_of_their_own() -> None:
    below = document(step(1, [7], [8]), trajectory_id="below", extra={"role": "subagent"})
    copied = step(1, [1, 2], [3], is_copied_context=True)
    rows = read_rows(document(copied, step(2, [1, 2, 3, 4], [5]), subagent_trajectories=[below]), **SAID)
    assert [(row.token_ids.tolist(), row.loss_mask.tolist(), row.role) for row in rows] == [
        ([1, 2, 3, 4, 5], [0, 0, 0, 0, 1], "main"),
        ([7, 8], [0, 1], "subagent"),
    ]


def without(metric: str) -> dict[str, Any]:
    found = step(1, [1, 2], [3])
    del found["metrics"][metric]
    return found


@pytest.mark.parametrize(
    ("broken", "said", "message"),
    [
        (step(1, [1], [2, 3], llm_call_count=2), SAID, "step 1 has the ids of 2 calls"),
        (without("prompt_token_ids"), SAID, "no prompt_token_ids"),
        (without("logprobs"), SAID, "not a logprob for each"),
        (step(1, [1], [2]), {}, "step 1 does not say its weight_versions: pass weight_version"),
    ],
)
def test_a_document_that_does_not_say_what_was_sampled_is_refused(
    broken: dict[str, Any], said: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_rows(document(broken), **said)


def test_a_document_without_ids_has_no_rows() -> None:
    assert read_rows(document({"step_id": 1, "source": "user", "message": "q"})) == []
