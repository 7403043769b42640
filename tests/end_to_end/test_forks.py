"""A real vLLM behind forks and lookahead: what is sampled from a pivot, and what a chooser picks, has the logprobs of its row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import openai
import pytest

from examples.vllm_server import VllmServer
from tests.end_to_end.test_closed_loop import assert_true, balanced, row_of
from tests.support.service.verbatim_process import Serving, wait_until

pytestmark = pytest.mark.engine

QUESTIONS = ("Find the number.", "Is it even?", "Say it again.", "Why?")
NO_THINKING = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def serving(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving("--engine", vllm_server.url, "--workers", "2", data_dir=tmp_path_factory.mktemp("data")) as service:
        wait_until(lambda: service.request("GET", "/readyz").status_code == 200, 60, "ready")
        yield service


def converse(created: dict[str, Any]) -> list[str]:
    """The replies to the questions, each asked with all before it."""
    messages: list[Any] = []
    with openai.OpenAI(base_url=created["base_urls"]["openai"], api_key=created["api_key"], max_retries=0) as client:
        for question in QUESTIONS:
            messages.append({"role": "user", "content": question})
            chunks = client.chat.completions.create(
                model="policy", messages=messages, max_tokens=24, stream=True, extra_body=NO_THINKING
            )
            said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
            messages.append({"role": "assistant", "content": said})
    return [message["content"] for message in messages[1::2]]


def test_what_a_fork_samples_follows_what_its_origin_sampled(serving: Serving, tiny_model: Path) -> None:
    origin = serving.request("POST", "/sessions", json={"sampling": {"seed": 5}}).json()
    said = converse(origin)
    recorded = serving.request("GET", f"/sessions/{origin['session_id']}/calls").json()["calls"]
    replay = {"session_id": origin["session_id"], "until": recorded[2]["call_id"], "on_divergence": "fail"}
    forks = [
        serving.request("POST", "/sessions", json={"replay": replay, "sampling": {"seed": seed}}).json() for seed in (6, 7)
    ]
    told = [converse(fork) for fork in forks]
    assert [each[:2] for each in told] == [said[:2]] * 2
    assert len({each[2] for each in [said, *told]}) == 3
    for fork in forks:
        calls = serving.request("GET", f"/sessions/{fork['session_id']}/calls").json()["calls"]
        assert [call["call_id"] for call in calls[:2]] == [call["call_id"] for call in recorded[:2]]
        assert calls[2]["prompt_ids"] == recorded[2]["prompt_ids"]
        answer = serving.request("GET", f"/sessions/{fork['session_id']}/trajectories").json()
        assert balanced(answer["accounting"])
        own = sum(len(call["completion_ids"]) for call in calls[2:])
        assert answer["accounting"]["exported_tokens"] == sum(sum(row["loss_mask"]) for row in answer["trajectories"]) == own
        assert answer["accounting"]["replayed_tokens"] == sum(len(call["completion_ids"]) for call in calls[:2])
        assert_true([row_of(row) for row in answer["trajectories"]], tiny_model)


def test_the_most_probable_of_real_candidates_is_what_the_next_call_continues(serving: Serving, tiny_model: Path) -> None:
    created = serving.request("POST", "/sessions", json={"lookahead": {"n": 3, "choose": "logprob"}}).json()
    said = converse(created)
    calls = serving.request("GET", f"/sessions/{created['session_id']}/calls").json()["calls"]
    assert len(calls) == 3 * len(QUESTIONS)
    chosen, parent_id = [], None
    for number, text in enumerate(said):
        candidates = calls[3 * number : 3 * number + 3]
        best = max(candidates, key=lambda call: mean(call["logprobs"]))
        assert [call["lookahead"] for call in candidates] == ["chosen", "not_chosen", "not_chosen"]
        assert len({tuple(call["completion_ids"]) for call in candidates}) == 3
        assert (candidates[0], best["reply"]["content"]) == (best, text)
        assert {call["parent_id"] for call in candidates} == {parent_id}
        chosen, parent_id = [*chosen, best], best["call_id"]
    answer = serving.request("GET", f"/sessions/{created['session_id']}/trajectories").json()
    assert balanced(answer["accounting"])
    assert answer["accounting"]["exported_tokens"] == sum(len(call["completion_ids"]) for call in chosen)
    rows = [row_of(row) for row in answer["trajectories"]]
    assert [call_id for row in rows for call_id in row.call_ids] == [call["call_id"] for call in chosen]
    assert_true(rows, tiny_model)
