"""Random harnesses against the real service and the real engine: nothing they do costs or bends a token.

Between the service and vLLM stands a relay that notes which ids the engine was really given and what it sampled: the promises are
checked against its notes, not against the service's own books. Run with `-s` to see the figures of every session.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from examples.vllm_server import VllmServer
from reconstruct.trajectory import Trajectory
from tests.support.engine.real_engine import TOLERANCE, load, row_of
from tests.support.engine.recording_relay import Choice, RecordingRelay
from tests.support.service.verbatim_process import ADMIN, Serving, wait_until
from tests.support.sessions.random_harness import Done, RandomHarness
from trainer_client.recompute import recompute

pytestmark = pytest.mark.engine

SEEDS = {"template": range(5), "retain": range(5, 10)}
CALLS = 16
AT_ONCE = 3
Given = tuple[list[int], Choice]
"""The prompt's ids and what was sampled after them, as the relay saw both."""
QUARANTINED = {"not_delivered"}


@dataclass(frozen=True)
class Played:
    """One session after its harness is done."""

    seed: int
    known_steps: set[str]
    done: Done
    calls: list[dict[str, Any]]
    rows: dict[str, list[Trajectory]]
    accounting: dict[str, dict[str, Any]]


@pytest.fixture(scope="module")
def relay(vllm_server: VllmServer) -> Iterator[RecordingRelay]:
    with RecordingRelay(vllm_server.url) as relay:
        yield relay


@pytest.fixture(scope="module")
def model(tiny_model: Path) -> Any:
    return load(tiny_model)


@contextmanager
def serving(relay: RecordingRelay, data_dir: Path, thinking: str) -> Iterator[Serving]:
    with Serving("--engine", relay.url, "--thinking", thinking, data_dir=data_dir, VERBATIM_STRICT_MODELS="true") as service:
        service.await_ready()
        yield service


def play(service: Serving, seed: int) -> Played:
    created = service.request("POST", "/sessions", json={}).json()
    harness = RandomHarness(created["base_urls"]["openai"], created["api_key"], seed)
    try:
        done = harness.run(CALLS)
    finally:
        harness.close()
    path = f"{service.url}/sessions/{created['session_id']}"
    with httpx.Client(headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60) as control:
        wait_until(lambda: is_settled(calls_of(control, path), done), 60, "every call is recorded and its delivery noted")
        answers = {name: control.get(f"{path}/trajectories?builder={name}").json() for name in ("merged", "per_call")}
        rows = {name: [row_of(row) for row in answer["trajectories"]] for name, answer in answers.items()}
        accounting = {name: answer["accounting"] for name, answer in answers.items()}
        return Played(seed, set(harness.steps()), done, calls_of(control, path), rows, accounting)


def calls_of(control: httpx.Client, path: str) -> list[dict[str, Any]]:
    answer = control.get(f"{path}/calls?limit=1000").json()
    assert answer["cursor"] is None
    calls: list[dict[str, Any]] = answer["calls"]
    return calls


def is_settled(calls: list[dict[str, Any]], done: Done) -> bool:
    """Whether nothing is under way and every answer that the harness has read is known to have gone out."""
    delivered = {call["call_id"] for call in calls if call["delivered"]}
    return done.answered <= delivered and all(call["status"] not in ("in_flight", "dangling") for call in calls)


@pytest.mark.case(33)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("thinking", ["template", "retain"])
def test_whatever_a_harness_does_its_rows_are_true_and_every_token_is_in_one_place(
    relay: RecordingRelay, tmp_path: Path, model: Any, thinking: str
) -> None:
    relay.generated.clear()
    with serving(relay, tmp_path, thinking) as service, ThreadPoolExecutor(AT_ONCE) as pool:
        sessions = list(pool.map(lambda seed: play(service, seed), SEEDS[thinking]))
    assert {name for played in sessions for name in played.done.steps} == sessions[0].known_steps
    recorded = {call["call_id"] for played in sessions for call in played.calls}
    sampled = {name for name, made in relay.generated.items() if any(choice.token_ids for choice in made.choices.values())}
    assert sampled <= recorded
    for played in sessions:
        given = given_by(relay, played.calls)
        assert_recorded(played.calls, given)
        trained = {builder: assert_context(rows, given) for builder, rows in played.rows.items()}
        assert trained["merged"] == trained["per_call"]
        for builder in played.rows:
            assert_each_once(played, builder, trained[builder])
        difference = largest_difference(model, played, given)
        report(thinking, played, difference)
        assert difference < TOLERANCE


def given_by(relay: RecordingRelay, calls: list[dict[str, Any]]) -> dict[str, Given]:
    """What the engine was given and said for each call, by call id. The choices of one call started at one moment."""
    groups: dict[float, list[str]] = {}
    for call in calls:
        groups.setdefault(call["started_at"], []).append(call["call_id"])
    given: dict[str, Given] = {}
    for names in groups.values():
        (made,) = [relay.generated[name] for name in names if name in relay.generated]
        assert len(made.choices) == len(names)
        given |= {name: (made.prompt_ids, made.choices[index]) for index, name in enumerate(names)}
    return given


def assert_recorded(calls: list[dict[str, Any]], given: dict[str, Given]) -> None:
    """Each record holds the ids that the engine was given, and those it sampled with their logprobs."""
    for call in calls:
        prompt_ids, choice = given[call["call_id"]]
        assert call["prompt_ids"] == prompt_ids
        assert call["completion_ids"] == choice.token_ids
        assert np.array_equal(np.array(call["logprobs"], np.float32), np.array(choice.logprobs, np.float32))


def assert_context(rows: list[Trajectory], given: dict[str, Given]) -> dict[str, list[int]]:
    """The ids before a trained token are the ones the engine was given when it sampled it. Returns, by call, how often each of
    its sampled tokens is trained; nothing else is."""
    counts = {call_id: [0] * len(choice.token_ids) for call_id, (_, choice) in given.items()}
    for row in rows:
        token_ids, mask = row.token_ids.tolist(), row.loss_mask.tolist()
        for call_id in row.call_ids:
            prompt_ids, choice = given[call_id]
            start, end = len(prompt_ids), len(prompt_ids) + len(choice.token_ids)
            assert token_ids[:end] == prompt_ids + choice.token_ids
            counts[call_id] = [count + bit for count, bit in zip(counts[call_id], mask[start:end], strict=True)]
            mask[start:end] = [0] * (end - start)
        assert end == len(token_ids)
        assert not any(mask)
    return counts


def assert_each_once(played: Played, builder: str, trained: dict[str, list[int]]) -> None:
    """Every sampled token is trained once, or its call is in the quarantine with a known reason."""
    accounting = played.accounting[builder]
    refused = {item["call_id"]: item for item in accounting["quarantined"]}
    assert {item["reason"] for item in accounting["quarantined"]} <= QUARANTINED
    for call_id, counts in trained.items():
        assert set(counts) <= ({0} if call_id in refused else {1}), (builder, call_id)
        assert call_id not in refused or refused[call_id]["tokens"] == len(counts)
    exported = sum(map(sum, trained.values()))
    assert accounting["exported_tokens"] == exported
    assert accounting["sampled_tokens"] == sum(map(len, trained.values()))
    assert accounting["sampled_tokens"] == exported + sum(item["tokens"] for item in accounting["quarantined"])


def largest_difference(model: Any, played: Played, given: dict[str, Given]) -> float:
    """Largest |stored - recomputed| over the trained tokens of both builders.

    A grammar bends even raw logprobs: what a forced tool call sampled is renormalised over what the grammar allowed, so the
    stored logprob of such a token can only be the greater one.
    """
    largest = 0.0
    for row in (*played.rows["merged"], *played.rows["per_call"]):
        mask = row.loss_mask.astype(bool)
        difference = row.logprobs - recompute(model, row)
        for call_id in played.done.forced.intersection(row.call_ids):
            prompt_ids, choice = given[call_id]
            bent = slice(len(prompt_ids), len(prompt_ids) + len(choice.token_ids))
            assert (difference[bent][mask[bent]] > -TOLERANCE).all()
            mask[bent] = False
        largest = max(largest, float(np.abs(difference[mask]).max(initial=0.0)))
    return largest


def report(thinking: str, played: Played, difference: float) -> None:
    done, accounting = played.done, played.accounting["merged"]
    branches = Counter(call["branch_reason"] or "extends" for call in played.calls)
    quarantined = Counter(item["reason"] for item in accounting["quarantined"])
    left_out = sum(item["tokens"] for item in accounting["quarantined"])
    lines = (
        f"{thinking}, seed {played.seed}: {len(played.calls)} calls ({done.tool_calls} tool calls) in {done.conversations} "
        f"conversations are {len(played.rows['merged'])} rows",
        f"{accounting['sampled_tokens']} tokens sampled = {accounting['exported_tokens']} exported + {left_out} quarantined",
        f"largest difference {difference:.1e}; {dict(quarantined)}; {dict(branches)}; {dict(done.steps)}",
    )
    print("\n" + "\n    ".join(lines))  # noqa: T201
