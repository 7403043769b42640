"""What must be true after rollouts whose nodes were killed, held against what the engine sampled and what the trainer was given.

Every rollout has ended, once; each has one session, that of its last attempt, closed as its verdict says; the verdict is what the
model's play in that session leads to; the trainer got the sessions that have a reward and no others; and what is trained was
sampled by the engine, in that session.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np

from reconstruct.trajectory import Trajectory
from tests.harnesses.rollout_plays import Exercise, plays_in
from tests.support.engine.scripted_engine import Generation, logprobs_of
from tests.support.service.verbatim_process import ADMIN, TRAINER
from trainer_client.client import TrainerClient

ENDS = ("rollout.completed", "rollout.failed", "rollout.timeout", "rollout.cancelled")
LEASE_WAIT_SECONDS = 20.0
_REQUEST = "generate-tokens-"

Outcome = tuple[str, str | None, float | None]
"""Status, class of the failure, reward."""
EXPECTED: Mapping[str, Outcome] = {
    "solve": ("completed", None, 1.0),
    "fail": ("completed", None, 0.0),
    "crash": ("failed", "harness_failed", None),
    "hang": ("timeout", "agent_timeout", 0.0),
}
TOO_SLOW: Outcome = ("failed", "no_calls", None)
"""Of an agent with a small budget that had not called the model by the end of it."""


@dataclass
class Accounted:
    """`lost` and `doubled` are rollouts, by name: there are none, or the check failed."""

    rollouts: int = 0
    lost: list[str] = field(default_factory=list)
    doubled: list[str] = field(default_factory=list)
    outcomes: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Agent -> play -> number of rollouts that ended with it."""
    statuses: Counter[str] = field(default_factory=Counter)
    failures: Counter[str] = field(default_factory=Counter)
    """Of rollouts that ended with one, by class."""
    retried: Counter[str] = field(default_factory=Counter)
    """Of attempts that were made again, by class."""
    attempts: int = 0
    calls: int = 0
    sampled_tokens: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    rows: int = 0
    trained_tokens: int = 0


@dataclass(frozen=True)
class Final:
    """The session that a rollout ended with."""

    session_id: str
    exercise: Exercise
    verdict: dict[str, Any]
    calls: list[dict[str, Any]]


def account(url: str, given: Sequence[Exercise], made: Sequence[Generation]) -> Accounted:
    """Everything, after the last task has ended; whatever is ready is leased and acknowledged. Raises AssertionError."""
    done = Accounted()
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60) as control:
        finals = {final.session_id: final for exercise in given for final in _ended(control, exercise, done)}
        assert (done.lost, done.doubled) == ([], [])
        assert done.rollouts == sum(exercise.samples for exercise in given)
        for final in finals.values():
            _check_play(final, done)
        exported = {final.session_id: _check_tokens(control, final, done) for final in finals.values()}
    usable = {session_id for session_id, tokens in exported.items() if tokens and finals[session_id].verdict["usable"]}
    _check_batches(url, finals, usable, {each.request_id.removeprefix(_REQUEST): each for each in made}, done)
    return done


def _ended(control: httpx.Client, exercise: Exercise, done: Accounted) -> Iterator[Final]:
    """The last session of each of its rollouts. What is lost or doubled is noted."""
    rollouts = _get(control, f"/tasks/{exercise.task_id}/rollouts")["rollouts"]
    ends = Counter(event["index"] for event in _events(control, exercise.task_id) if event["event"] in ENDS)
    sessions = list(_pages(control, f"/sessions?group_id={exercise.task_id}", "sessions"))
    held = Counter(int(session["session_id"].split(".")[1]) for session in sessions)
    status = {session["session_id"]: session["status"] for session in sessions}
    for index in range(exercise.samples):
        name = f"{exercise.task_id}.{index}"
        rollout = next((each for each in rollouts if each["index"] == index), None)
        verdict = rollout and rollout["verdict"]
        if not rollout or not verdict or not ends[index] or not held[index]:
            done.lost.append(f"{name}: {rollout}, {ends[index]} ends, {held[index]} sessions")
            continue
        if ends[index] > 1 or held[index] > 1:
            done.doubled.append(f"{name}: {ends[index]} ends, {held[index]} sessions")
            continue
        session_id = rollout["session_id"] or f"{name}.{rollout['attempt']}"
        assert status.get(session_id) == verdict["status"] == rollout["status"], f"{session_id}: {status}, {rollout}"
        done.rollouts += 1
        done.attempts += rollout["attempt"]
        done.statuses[verdict["status"]] += 1
        done.retried.update(failure["failure"] for failure in rollout["failures"])
        yield Final(session_id, exercise, verdict, list(_pages(control, f"/sessions/{session_id}/calls", "calls")))


def _check_play(final: Final, done: Accounted) -> None:
    """The verdict is what its play leads to."""
    failure = (final.verdict["failure"] or {}).get("failure")
    outcome: Outcome = (final.verdict["status"], failure, final.verdict["reward"])
    # A first call that was made twice was given two plays; the agent knows of one of them.
    plays = {play for call in final.calls for play in plays_in(json.dumps(call["reply"]))}
    fitting = [play for play in plays if EXPECTED[play] == outcome]
    hurried = final.exercise.hurried and (outcome == TOO_SLOW or (not plays and outcome == EXPECTED["hang"]))
    assert fitting or hurried, f"{final.session_id} by {final.exercise.cli.harness} played {plays}: {final.verdict}"
    done.outcomes[final.exercise.cli.harness][fitting[0] if fitting else "hang"] += 1
    if failure is not None:
        done.failures[failure] += 1


def _check_tokens(control: httpx.Client, final: Final, done: Accounted) -> int:
    """How many of its tokens are in its rows."""
    accounting = _get(control, f"/sessions/{final.session_id}/trajectories")["accounting"]
    quarantined = Counter({item["reason"]: item["tokens"] for item in accounting["quarantined"]})
    sampled = sum(len(call["completion_ids"]) for call in final.calls)
    assert accounting["sampled_tokens"] == sampled == accounting["exported_tokens"] + quarantined.total()
    done.calls += len(final.calls)
    done.sampled_tokens += sampled
    done.quarantined += quarantined
    return int(accounting["exported_tokens"])


def _check_batches(
    url: str, finals: Mapping[str, Final], usable: set[str], made: Mapping[str, Generation], done: Accounted
) -> None:
    """A trainer is given the `usable` sessions, in a group for each task that has one, and no others."""
    groups = {finals[session_id].exercise.task_id for session_id in usable}
    rows: list[Trajectory] = []
    with TrainerClient(url, TRAINER) as client:
        while missing := groups - {row.group_id for row in rows}:
            batch = client.lease(max_groups=len(missing), wait_seconds=LEASE_WAIT_SECONDS)
            assert batch is not None, f"no trainer gets {sorted(missing)[:5]}, {len(missing)} in all"
            with batch:
                rows += batch.rows
                done.groups += len(batch.groups)
        assert client.lease(wait_seconds=1.0) is None, "there are more groups than tasks with a usable rollout"
    assert done.groups == len(groups), "a group came twice"
    assert {row.session_id for row in rows} == usable
    assert len({row.trajectory_id for row in rows}) == len(rows)
    for row in rows:
        _check_row(row, finals[row.session_id], made)
    done.rows = len(rows)
    done.trained_tokens = sum(int(row.loss_mask.sum()) for row in rows)


def _check_row(row: Trajectory, final: Final, made: Mapping[str, Generation]) -> None:
    """It is of its own session's calls, token for token as the engine was given and has sampled them."""
    assert row.reward == final.verdict["reward"]
    assert set(row.call_ids) <= {call["call_id"] for call in final.calls}, f"{row.trajectory_id} has another session's calls"
    mask = np.zeros(len(row.token_ids), bool)
    for call_id in row.call_ids:
        prompt, sampled = made[call_id].prompt_ids, made[call_id].sampled[0]
        start, end = len(prompt), len(prompt) + len(sampled)
        assert row.token_ids[:end].tolist() == [*prompt, *sampled], f"{call_id} was sampled otherwise"
        assert np.array_equal(row.logprobs[start:end], np.array(logprobs_of(prompt, sampled), np.float32))
        mask[start:end] = True
    assert np.array_equal(row.loss_mask.astype(bool), mask), f"{row.trajectory_id} trains what was not sampled"


def _events(control: httpx.Client, task_id: str) -> list[dict[str, Any]]:
    """All of them: the stream of a task that has ended ends."""
    lines = control.get(f"/tasks/{task_id}/events").raise_for_status().text.splitlines()
    kinds = [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]
    data = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    return [{"event": kind, **told} for kind, told in zip(kinds, data, strict=True)]


def _pages(control: httpx.Client, path: str, what: str) -> Iterator[dict[str, Any]]:
    cursor: str | None = ""
    while cursor is not None:
        page = _get(control, path + (f"{'&' if '?' in path else '?'}cursor={cursor}" if cursor else ""))
        yield from page[what]
        cursor = page["cursor"]


def _get(control: httpx.Client, path: str) -> Any:
    answer = control.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return answer.json()
