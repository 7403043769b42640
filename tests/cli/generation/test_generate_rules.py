"""What `verbatim generate` decides by itself: which expressions it takes, what they accept, which attempts are kept."""

from __future__ import annotations

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from cli.generation.attempts import NAMES, Accept, Attempt, Decision, Input, Progress, RoundPlan, judge, measure_seconds
from cli.generation.folder import GenerationFolder
from cli.generation.rounds import find_shared_failure
from cli.generation.screen import make_table, summarize, summarize_failures, summarize_input
from cli.refusal import CommandError
from proxy.archive.folder import ArchiveWriter

VALUES: dict[str, Any] = {
    "reward": 0.5,
    "status": "completed",
    "calls": 3,
    "tokens": 40,
    "seconds": 2.5,
    "attempt": 1,
    "metadata": {"level": "hard", "n": 2},
}


@pytest.mark.parametrize(
    ("text", "accepted"),
    [
        ("reward > 0", True),
        ("reward > 0 and calls < 3", False),
        ("0 < reward <= 0.5", True),
        ("status in ['completed', 'timeout'] and not tokens > 50", True),
        ("metadata.level == 'hard' and metadata['n'] == 2", True),
        ("max(reward, seconds) == 2.5 if attempt == 1 else False", True),
        ("reward", True),
    ],
)
def test_an_expression_is_evaluated_over_what_is_known_of_an_attempt(text: str, accepted: bool) -> None:
    assert set(VALUES) == set(NAMES)
    assert Accept(text).decide(VALUES).accepted is accepted


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("reward >", "invalid syntax"),
        ("", "invalid syntax"),
        ("rewards > 0", "there is no 'rewards' (known: reward, status"),
        ("reward > 0 or oops", "there is no 'oops'"),
        ("open('x')", "there is no 'open'"),
        ("metadata.get('x')", "only abs, len"),
        ("(lambda: 1)()", "only abs"),
        ("reward = 1", "invalid syntax"),
        ("reward > 0; reward", "invalid syntax"),
        ("(reward := 1)", "NamedExpr is not allowed"),
        ("-" * 100_000 + "1", "--accept"),
    ],
)
def test_an_expression_that_cannot_be_used_is_refused_before_anything_starts(text: str, says: str) -> None:
    with pytest.raises(CommandError, match="--accept") as refused:
        Accept(text)
    assert says in str(refused.value) and refused.value.exit_code == 2


def test_what_has_no_reward_is_not_accepted_by_one_that_asks_for_it() -> None:
    decision = Accept("reward >= 0 or calls > 0").decide({**VALUES, "reward": None})
    assert (decision.accepted, decision.why) == (False, "there is no reward")
    assert Accept("calls > 0").decide({**VALUES, "reward": None}).accepted


def test_an_attempt_that_lacks_what_is_asked_says_so() -> None:
    decision = Accept("metadata.lvl == 1").decide(VALUES)
    assert not decision.accepted and "lvl" in decision.why
    assert "TypeError" in Accept("metadata.level > 1").decide(VALUES).why


@pytest.mark.parametrize(
    ("limits", "made", "accepted", "following"),
    [
        (RoundPlan(8, 8, 1), 8, 0, 0),
        (RoundPlan(1, 4, 1), 1, 0, 1),
        (RoundPlan(1, 4, None), 1, 1, 0),
        (RoundPlan(4, 6, 2), 4, 1, 2),
        (RoundPlan(4, 16, 2), 4, 2, 0),
    ],
)
def test_a_round_follows_while_too_few_are_accepted(limits: RoundPlan, made: int, accepted: int, following: int) -> None:
    assert limits.next_round(made, accepted) == following


def test_the_best_are_kept_and_of_equal_ones_the_earlier() -> None:
    def attempt(index: int, reward: float) -> Attempt:
        return Attempt(
            "t", index, f"t.{index}.1", None, None, {**VALUES, "reward": reward}, Accept("reward > 0").decide(VALUES)
        )

    made = [attempt(0, 0.5), attempt(1, 1.0), attempt(2, 0.5), attempt(3, 1.0)]
    for ended in (made, made[::-1]):
        assert [kept.index for kept in RoundPlan(4, 4, 3).select(ended, lambda attempt: True)] == [1, 3, 0]
    assert [kept.index for kept in RoundPlan(4, 4, None).select(made, lambda attempt: True)] == [0, 1, 2, 3]
    # A session that is gone makes place for the next best.
    assert [kept.index for kept in RoundPlan(4, 4, 2).select(made, lambda attempt: attempt.index != 1)] == [3, 0]


def test_a_run_that_was_broken_off_takes_nothing_back_of_what_was_decided(tmp_path: Path) -> None:
    made = Attempt("g.a.r1", 0, "s", None, None, VALUES, Accept("reward > 0").decide(VALUES))
    other = replace(made, index=1, session_id="t")
    for done in (True, False):
        with GenerationFolder(tmp_path, {}) as folder:
            way = Progress(Input("a", 1, {}), 1, "g.a.r1", {}, [made, other], [made] if done else [], done=done)
            folder.settle([way], complete=False)
        told = [json.loads(line) for line in (tmp_path / "rollouts.jsonl").read_text().splitlines()]
        assert [line["kept"] for line in told] == [True, False]


def test_of_two_generations_in_one_folder_the_second_changes_nothing(tmp_path: Path) -> None:
    with ArchiveWriter(tmp_path / "accepted"), pytest.raises(CommandError, match="cannot be used"):
        GenerationFolder(tmp_path, {}).__enter__()
    assert not (tmp_path / "generation.json").exists()


def test_a_folder_that_cannot_be_made_is_named_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CommandError, match=r"cannot be used: .*/file: File exists$"):
        GenerationFolder(tmp_path / "file", {}).__enter__()


def test_the_seconds_of_an_attempt_are_those_of_its_harness() -> None:
    assert measure_seconds({"queued": 1.0, "preparing": 2.0, "running": 5.0, "evaluating": 7.5, "completed": 9.0}) == 2.5
    assert measure_seconds({"queued": 1.0, "preparing": 2.0, "failed": 9.0}) is None


def test_the_table_shows_each_task_its_rewards_and_its_tokens() -> None:
    made = Attempt("g.a.r1", 0, "s", None, None, VALUES, Accept("reward > 0").decide(VALUES))
    lost = Attempt(
        "g.b.r1", 0, None, None, None, {**VALUES, "reward": None, "tokens": None}, Decision(False, "there is no reward")
    )
    way = Progress(Input("a", 1, {}), 1, "g.a.r1", {"completed": 1}, [made], [made], done=True)
    other = Progress(Input("b", 2, {}), 2, "g.b.r2", {"running": 1}, [lost])
    shown = io.StringIO()
    Console(file=shown, width=120).print(make_table([way, other]))
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in shown.getvalue().splitlines() if "│" in line]
    assert cells == [["b", "2", "1 running", "1", "0", "", "0"], ["a", "1", "", "1", "1", "0.5", "40"]]
    assert summarize_input(way) == "task a: 1 of 1 attempts accepted, 1 kept, 40 tokens, rewards 0.5"
    told = summarize([way, other])
    assert told == (
        "1 of 2 tasks ended, 1 with an accepted attempt; 2 attempts, 1 accepted, 1 kept, mean reward 0.5, 40 tokens"
    )


def test_in_a_narrow_terminal_each_task_has_one_whole_line() -> None:
    ways = [Progress(Input(f"t-{n:03}", n, {}), 1, "", {"queued": 2, "preparing": 1, "running": 1}) for n in range(9)]
    shown = io.StringIO()
    Console(file=shown, width=80).print(make_table(ways, rows=4, wide=False))
    lines = [line for line in shown.getvalue().splitlines() if "t-" in line]
    assert len(lines) == 4 and all("2 queued 1 preparing 1 running" in line for line in lines)
    assert "…" not in shown.getvalue()


def test_what_failed_is_told_with_its_class_and_where_to_look() -> None:
    """Also where nothing was accepted: why is not to be searched for."""
    failure = {"failure": "harness_missing", "message": "pi is not there\nand cannot be installed", "look": "n:/logs/a/0.1"}
    values = {**VALUES, "reward": None}
    made = [Attempt("g.a.r1", index, None, failure, None, values, Decision(False, "there is no reward")) for index in (0, 1)]
    way = Progress(Input("a", 1, {}), 1, "g.a.r1", {}, made, done=True)
    assert summarize_input(way) == "task a: 0 of 2 attempts accepted, 0 kept, 80 tokens, 2 harness_missing"
    assert summarize_failures([way]) == [
        "2 attempts failed as harness_missing: pi is not there and cannot be installed (see n:/logs/a/0.1)"
    ]


def test_an_attempt_is_recorded_with_the_evaluators_reasons() -> None:
    rollout = {
        "index": 0,
        "status": "completed",
        "calls": 1,
        "times": {},
        "attempt": 1,
        "session_id": "t.0.1",
        "logs": None,
        "verdict": {"reward": 0.0, "feedback": "3 passed, 1 failed", "metadata": {}, "failure": None},
    }
    attempt = judge(rollout, {"task_id": "t", "metadata": {}}, 5, Accept("reward > 0"))
    (line,) = Progress(Input("a", 1, {}), attempts=[attempt]).lines()
    assert (line["accepted"], line["feedback"]) == (False, "3 passed, 1 failed")


def failed(name: str, message: str, calls: int = 0) -> Attempt:
    failure = {"failure": name, "message": message, "look": "node:/logs"}
    return Attempt("t", 0, "s", failure, None, {**VALUES, "calls": calls}, Decision(False))


def attempted(attempts: list[Attempt], *harnesses: str) -> list[Progress]:
    """One input per harness; all attempts are at the first."""
    inputs = [Input(name, 1, {"harness": {"name": name}}) for name in harnesses]
    return [Progress(each, attempts=attempts if each is inputs[0] else []) for each in inputs]


@pytest.mark.parametrize(
    ("attempts", "harnesses", "shared"),
    [
        ([failed("no_calls", "a"), failed("no_calls", "a")], "x", False),
        ([failed("no_calls", f"exit code {n}, see /a/{n}") for n in range(3)], "x", True),
        ([failed("no_calls", "a")] * 2 + [failed("bad_runtime", "a")], "x", False),
        ([failed("no_calls", "a")] * 2 + [failed("no_calls", "b")], "x", False),
        ([failed("no_calls", "a")] * 3 + [replace(failed("no_calls", "a"), failure=None)], "x", False),
        # What the policy may have caused is an attempt like any other.
        ([failed("harness_failed", "a", calls=2)] * 3, "x", False),
        ([failed("harness_failed", "a")] * 3, "x", True),
        # One is enough of what the others use as well.
        ([failed("harness_missing", "a")], "x", True),
        ([failed("harness_missing", "a")], "xy", False),
        ([], "x", False),
        # All have been made.
        ([failed("no_calls", "a")] * 8, "x", False),
    ],
)
def test_a_failure_is_shared_if_enough_attempts_had_it(attempts: list[Attempt], harnesses: str, shared: bool) -> None:
    found = find_shared_failure(attempted(attempts, *harnesses), RoundPlan(8, 8, 1))
    assert (found is not None) is shared
