"""Whose reward is whose: several rows of one rollout, branches and calls with rewards of their own, from a harness to a batch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from examples.pivots.forks import vine
from examples.pivots.turns import turns_of
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService, Session
from trainer_client.advantages import dr_grpo, grpo, leave_one_out
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


@pytest.fixture
def service(engine: ScriptedEngine, redis_url: str) -> Iterator[RunningService]:
    with RunningService(engine.url, redis_url) as service:
        yield service


def fanned_out(session: Session, branches: int) -> None:
    """One question, and as many ways to go on from its answer."""
    asked: list[Any] = [{"role": "user", "content": "plan it"}]
    said = session.answer(asked)
    for at in range(branches):
        session.answer([*asked, said, {"role": "user", "content": f"helper {at}, do your part"}])


def group_of(service: RunningService, *rollouts: tuple[int, float]) -> list[Session]:
    """Closed sessions of one group, each of so many branches and with that reward."""
    sessions = [service.session(group_id="g", group_size=len(rollouts)) for _ in rollouts]
    for session, (branches, reward) in zip(sessions, rollouts, strict=True):
        fanned_out(session, branches)
        session.close(reward=reward)
    return sessions


def leased(client: TrainerClient) -> Batch:
    batch = client.lease(keep=False)
    assert batch is not None
    return batch


@pytest.mark.case(48)
def test_a_fan_out_counts_once_in_the_baseline_of_its_group(service: RunningService, client: TrainerClient) -> None:
    """Rewards 4 in four rows, 0 and 2 in one each. The mean is 2 over rollouts; over rows it would be 3."""
    many, nothing, some = group_of(service, (4, 4.0), (1, 0.0), (1, 2.0))
    batch = leased(client)
    assert batch.rollout_ids == (many.session_id,) * 4 + (nothing.session_id, some.session_id)
    assert batch.columns.rollout_index.tolist() == [0, 0, 0, 0, 1, 2]
    assert batch.columns.row_weight.tolist() == [0.25] * 4 + [1.0, 1.0]
    assert batch.advantages(dr_grpo).tolist() == [2, 2, 2, 2, -2, 0]
    assert batch.advantages(leave_one_out).tolist() == [3, 3, 3, 3, -3, 0]
    np.testing.assert_allclose(batch.advantages(grpo), [1, 1, 1, 1, -1, 0], atol=1e-5)
    weighed = batch.columns.row_weight * batch.advantages(dr_grpo)
    assert weighed.sum() == 0, "rollouts are balanced however many rows they became"
    padded = batch.padded(rows=[3, 4])
    assert padded.row_weight.tolist() == [0.25, 1.0]


def test_rows_that_train_nothing_weigh_nothing(service: RunningService) -> None:
    session = service.session()
    fanned_out(session, 2)
    headers = {"x-openai-subagent": "compact"}
    session.ask("make a summary", extra_headers=headers)
    rows, _ = session.trajectories()
    assert {row["role"] for row in rows} == {"main", "compaction"}
    trained = [row for row in rows if any(row["loss_mask"])]
    assert [row["row_weight"] for row in trained] == [1 / len(trained)] * len(trained)
    assert [row["row_weight"] for row in rows if row not in trained] == [0.0] * (len(rows) - len(trained))
    assert {row["rollout_id"] for row in rows} == {session.session_id}


def test_a_branchs_reward_reaches_its_row_and_a_calls_the_row_it_is_in(service: RunningService, client: TrainerClient) -> None:
    """plan -> helper 0 and plan -> helper 1: the plan is trained in the first row, and shown in the second."""
    session = service.session()
    fanned_out(session, 2)
    plan, first, second = (call["call_id"] for call in session.calls)
    rewards = {"reward": 1.0, "per_branch": {second: -1.0}, "per_call": {plan: 0.5, first: 0.25}}
    assert service.request("POST", f"/sessions/{session.session_id}/reward", json=rewards).status_code == 200
    by_last = {row["call_ids"][-1]: row for row in session.trajectories()[0]}
    assert {name: row["reward"] for name, row in by_last.items()} == {first: 1.0, second: -1.0}
    metadata = by_last[first]["metadata"]
    assert metadata["per_call_rewards"] == {plan: 0.5, first: 0.25}
    mask = np.zeros(len(by_last[first]["loss_mask"]), dtype=int)
    for start, end in (metadata["per_call_spans"][call] for call in (plan, first)):
        mask[start:end] = 1
    assert mask.tolist() == by_last[first]["loss_mask"], "the calls lie where the sampled tokens are"
    assert by_last[second]["metadata"] == {}
    assert by_last[second]["call_ids"] == [plan, second]
    by_call = {row["call_ids"][0]: row["reward"] for row in session.trajectories("per_call")[0]}
    assert by_call == {plan: 0.5, first: 0.25, second: -1.0}
    session.close()
    batch = leased(client)
    assert dict(zip([row.call_ids[-1] for row in batch.rows], batch.columns.rewards.tolist(), strict=True)) == {
        first: 1.0,
        second: -1.0,
    }
    turns = turns_of(batch.rows)
    assert sorted(turns.number.tolist()) == [0, 1, 2]
    np.testing.assert_array_equal(turns.reward[np.argsort(turns.number)], [0.5, 0.25, np.nan])


def test_a_row_keeps_its_weight_when_it_comes_again(service: RunningService, client: TrainerClient) -> None:
    group_of(service, (3, 1.0))
    first = leased(client)
    first.nack()
    again = leased(client)
    assert [(row.trajectory_id, row.row_weight) for row in again.rows] == [
        (row.trajectory_id, row.row_weight) for row in first.rows
    ]


@pytest.mark.case(90)
def test_calls_are_worth_what_their_forks_get(
    service: RunningService, client: TrainerClient, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two turns, each "a" or "b"; only "a" twice is worth 1. Every fork is one of the courses that are equally likely from its pivot, so
    the values are exact: 1/4 at the first call, 1/2 after an "a", 0 after a "b"."""
    moves: list[str] = []
    monkeypatch.setattr(engine, "script", lambda generation, index: moves.pop(0))

    def play(group_id: str, said: str, size: int, origin: Session | None = None, until: str | None = None) -> Session:
        """A session of the group that gets `said` where nothing is replayed, closed with its reward."""
        moves[:] = said
        replay: dict[str, Any] = {"replay": {"session_id": origin.session_id, "until": until}} if origin else {}
        session = service.session(group_id=group_id, group_size=size, **replay)
        messages: list[Any] = [{"role": "user", "content": "your move"}]
        for _ in range(2):
            messages += [session.answer(messages), {"role": "user", "content": "go on"}]
        session.close(reward=float([each["content"] for each in messages[1::2]] == ["a", "a"]))
        assert not moves
        return session

    origin = play("origin", "ab", 1)
    first, second = (call["call_id"] for call in origin.calls)
    forks = [play("first", said, 4, origin, first) for said in ("aa", "ab", "ba", "bb")]
    for said in "ab":
        play("second", said, 2, origin, second)
    # Forks of a fork: after its "b" nothing is to be won.
    for said in "ab":
        play("third", said, 2, forks[2], forks[2].calls[1]["call_id"])
    batch = client.lease(max_groups=4, keep=False)
    assert batch is not None and len(batch) == 9
    columns, turns = batch.columns, turns_of(batch.rows)
    found = vine(columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows)

    def of(session: Session) -> tuple[list[float], list[float]]:
        (row,) = (at for at, each in enumerate(batch.rows) if each.session_id == session.session_id)
        return found.value[turns.row == row].tolist(), found.advantages[turns.row == row].tolist()

    assert of(origin) == ([0.25, 0.5], [0.25, -0.5])
    # A fork is no part of its own baseline: of the other three, one won after an "a", and one did after a "b".
    third = pytest.approx(1 / 3)
    assert of(forks[0]) == ([0, 0.5], [0.5, 0.5]) and of(forks[1]) == ([third, 0.5], [pytest.approx(1 / 6), -0.5])
    assert of(forks[2]) == ([third, 0], [pytest.approx(-1 / 3), 0])
