"""A real vLLM behind forks and lookahead: what is sampled from a pivot, and what a chooser picks, has the logprobs of its row."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from examples.vllm_server import VllmServer
from tests.support.engine.real_engine import PLAIN, assert_true, rows_of
from tests.support.service.running_service import Session, streamed_text
from tests.support.service.verbatim_process import Serving

pytestmark = pytest.mark.engine

QUESTIONS = ("Find the number.", "Is it even?", "Say it again.", "Why?")


@pytest.fixture(scope="module")
def serving(vllm_server: VllmServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with Serving("--engine", vllm_server.url, "--workers", "2", data_dir=tmp_path_factory.mktemp("data")) as service:
        service.await_ready()
        yield service


def converse(session: Session) -> list[str]:
    """The replies to the questions, each asked with all before it."""
    messages: list[Any] = []
    for question in QUESTIONS:
        messages.append({"role": "user", "content": question})
        said = streamed_text(session.ask(messages, max_tokens=24, stream=True, extra_body=PLAIN))[0]
        messages.append({"role": "assistant", "content": said})
    return [message["content"] for message in messages[1::2]]


def test_what_a_fork_samples_follows_what_its_origin_sampled(serving: Serving, tiny_model: Path) -> None:
    origin = serving.session(sampling={"seed": 5})
    said = converse(origin)
    recorded = origin.calls
    replay = {"session_id": origin.session_id, "until": recorded[2]["call_id"], "on_divergence": "fail"}
    forks = [serving.session(replay=replay, sampling={"seed": seed}) for seed in (6, 7)]
    told = [converse(fork) for fork in forks]
    assert [each[:2] for each in told] == [said[:2]] * 2
    assert len({each[2] for each in [said, *told]}) == 3
    for fork in forks:
        calls = fork.calls
        assert [call["call_id"] for call in calls[:2]] == [call["call_id"] for call in recorded[:2]]
        assert calls[2]["prompt_ids"] == recorded[2]["prompt_ids"]
        rows, accounting = fork.trajectories()
        own = sum(len(call["completion_ids"]) for call in calls[2:])
        assert accounting["exported_tokens"] == sum(sum(row["loss_mask"]) for row in rows) == own
        assert accounting["replayed_tokens"] == sum(len(call["completion_ids"]) for call in calls[:2])
        assert_true(rows_of(fork), tiny_model)


def test_the_most_probable_of_real_candidates_is_what_the_next_call_continues(serving: Serving, tiny_model: Path) -> None:
    session = serving.session(lookahead={"n": 3, "choose": "logprob"})
    said, calls = converse(session), session.calls
    assert len(calls) == 3 * len(QUESTIONS)
    chosen: list[Any] = []
    parent_id = None
    for number, text in enumerate(said):
        candidates = calls[3 * number : 3 * number + 3]
        best = max(candidates, key=lambda call: mean(call["logprobs"]))
        assert [call["lookahead"] for call in candidates] == ["chosen", "not_chosen", "not_chosen"]
        assert len({tuple(call["completion_ids"]) for call in candidates}) == 3
        assert (candidates[0], best["reply"]["content"]) == (best, text)
        assert {call["parent_id"] for call in candidates} == {parent_id}
        chosen, parent_id = [*chosen, best], best["call_id"]
    assert session.trajectories()[1]["exported_tokens"] == sum(len(call["completion_ids"]) for call in chosen)
    rows = rows_of(session)
    assert [call_id for row in rows for call_id in row.call_ids] == [call["call_id"] for call in chosen]
    assert_true(rows, tiny_model)
