"""`verbatim doctor` on training: from what sessions and groups show to what a person should do."""

from __future__ import annotations

from typing import Any

from cli.training import judge_groups, judge_sessions


def session(number: int, reward: float | None = 1.0, lost: dict[str, int] | None = None, **fields: Any) -> dict[str, Any]:
    """Of 100 sampled tokens."""
    quarantined = lost or {}
    accounting = {"sampled_tokens": 100, "exported_tokens": 100 - sum(quarantined.values()), "quarantined": quarantined}
    usual = {
        "session_id": f"s{number}",
        "group_id": None,
        "status": "completed",
        "trained": True,
        "closed_at": 1.0,
        "error": None,
    }
    told = {"dangling_calls": 0, "complete": True, "truncated": False}
    return {**usual, "reward": reward, "accounting": {**accounting, **told}, **fields}


def judge(*sessions: dict[str, Any]) -> list[tuple[str, str]]:
    return [(check.state, check.found) for check in judge_sessions(sessions)]


def test_a_run_of_which_nothing_is_learned_is_not_called_well() -> None:
    """Doctor said that all is well: 40 % quarantined, every reward 0, every group equal, four dead letters."""
    lost = {"no_token_ids": 30, "not_delivered": 10, "frozen_model": 5}
    sessions = [session(number, 0.0, lost, group_id=f"g{number // 4}") for number in range(100)]
    found = judge(*sessions)
    assert found == [
        ("fix", "40 % of the sampled tokens are quarantined: no_token_ids 30 %, not_delivered 10 %"),
        ("fix", "every reward is 0, of 100"),
        ("fix", "every group has equal rewards, of 25"),
    ]
    (dead,) = judge_groups(
        [{"state": "dead", "cause": "incomplete", "groups": 4}, {"state": "acked", "cause": "", "groups": 1}]
    )
    assert (dead.state, dead.found) == ("fix", "4 groups no longer delivered (dead letters): incomplete 4")
    assert all(check.advice for check in (*judge_sessions(sessions), dead))


def test_a_run_that_is_well_is_one_line() -> None:
    sessions = [session(number, float(number % 2), {"role_side": 40}, group_id=f"g{number // 4}") for number in range(40)]
    assert judge(*sessions) == [("ok", "40 sessions closed last, nothing is lost")]
    assert list(judge_groups([{"state": "acked", "cause": "", "groups": 9}])) == []


def test_few_sessions_of_one_reward_prove_nothing_and_what_waits_or_fails_is_named() -> None:
    assert judge(session(0, 0.0), session(1, 0.0)) == [("ok", "2 sessions closed last, nothing is lost")]
    assert judge() == [("note", "no session that could be trained has been closed yet")]
    waiting = [session(number, None, accounting=None) for number in range(4)]
    assert judge(*waiting) == [("fix", "no trainer gets 4 completed sessions without a reward")]
    assert judge(waiting[0]) == [("note", "no trainer gets 1 completed session without a reward")], "as after the quick start"
    failed = [session(number, None, status="failed", error="no such model") for number in range(5)]
    assert judge(*failed) == [("fix", "5 of the last 5 sessions failed, the newest of them: no such model")]


def test_groups_that_nobody_leases_are_noted() -> None:
    (check,) = judge_groups([{"state": "ready", "cause": "", "groups": 3}])
    assert (check.state, check.found) == ("note", "3 groups ready, and none was ever leased")
