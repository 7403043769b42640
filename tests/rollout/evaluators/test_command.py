"""Kind `command`: exit codes, printed numbers and printed objects as rewards."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rollout.evaluators.base import BadReward, EvaluationFailed, EvaluationTimedOut
from tests.support.runtimes.evaluations import evaluated


@pytest.mark.parametrize(("command", "reward"), [("true", 1.0), ("false", 0.0), ("exit 3", 0.0), ("kill -9 $$", 0.0)])
async def test_an_exit_code_is_the_reward(command: str, reward: float, tmp_path: Path) -> None:
    score = await evaluated("command", {"command": command}, tmp_path)
    assert score.reward == reward


async def test_the_output_is_the_feedback_and_lies_in_the_logs(tmp_path: Path) -> None:
    score = await evaluated("command", {"command": "echo seen; echo wrong >&2; exit 1"}, tmp_path)
    assert score.feedback == "seen\nwrong"
    assert ((tmp_path / "stdout.log").read_text(), (tmp_path / "stderr.log").read_text()) == ("seen\n", "wrong\n")


async def test_a_command_as_a_list_is_run_without_a_shell(tmp_path: Path) -> None:
    program = "import sys; sys.exit(sys.argv[1] != '$HOME')"
    score = await evaluated("command", {"command": [sys.executable, "-c", program, "$HOME"]}, tmp_path)
    assert score.reward == 1.0


async def test_a_command_that_is_not_there_is_no_reward_of_zero(tmp_path: Path) -> None:
    with pytest.raises(EvaluationFailed, match=r"(?s)could not be run: exit code 127.*no-such-tool"):
        await evaluated("command", {"command": "no-such-tool"}, tmp_path)


async def test_declared_exit_codes_have_their_rewards_and_no_others_have_any(tmp_path: Path) -> None:
    options: dict[str, Any] = {"exit_rewards": {"0": 1, "2": 0.5, "127": -1}}
    assert (await evaluated("command", {"command": "exit 2", **options}, tmp_path)).reward == 0.5
    assert (await evaluated("command", {"command": "no-such-tool", **options}, tmp_path)).reward == -1
    with pytest.raises(EvaluationFailed, match="'exit_rewards' has no reward for exit code 1"):
        await evaluated("command", {"command": "exit 1", **options}, tmp_path)


async def test_the_last_line_printed_is_the_number(tmp_path: Path) -> None:
    score = await evaluated("command", {"command": "echo 3 checks; echo 0.25; echo", "reward": "number"}, tmp_path)
    assert score.reward == 0.25


@pytest.mark.parametrize("pattern", [r"score: ([\d.]+)", r"(?<=score: )[\d.]+"])
async def test_the_last_match_of_a_pattern_is_the_number(pattern: str, tmp_path: Path) -> None:
    command = "echo score: 0.1; echo score: 0.75; echo that was it"
    score = await evaluated("command", {"command": command, "reward": "number", "pattern": pattern}, tmp_path)
    assert score.reward == 0.75


@pytest.mark.parametrize("printed", ["", "nan", "inf", "-Infinity", "perfect", "0,5", "1 2"])
async def test_what_is_no_finite_number_is_no_reward(printed: str, tmp_path: Path) -> None:
    with pytest.raises(BadReward):
        await evaluated("command", {"command": f"echo '{printed}'", "reward": "number"}, tmp_path)


async def test_a_pattern_takes_no_time_that_an_agent_could_stretch(tmp_path: Path) -> None:
    """A megabyte of digits: over all of them at once, this pattern would take 500,000,000,000 steps."""
    command = "head -c 1000000 /dev/zero | tr '\\0' 7; echo; echo 4 passed"
    options = {"command": command, "reward": "number", "pattern": r"(\d+) passed"}
    assert (await evaluated("command", options, tmp_path)).reward == 4.0


async def test_a_pattern_that_matches_nothing_is_no_reward(tmp_path: Path) -> None:
    options = {"command": "echo 1.0", "reward": "number", "pattern": r"score: (\d+)"}
    with pytest.raises(BadReward, match="printed no reward"):
        await evaluated("command", options, tmp_path)


async def test_a_printed_object_gives_rewards_of_rows_and_words(tmp_path: Path) -> None:
    (tmp_path / "object.json").write_text(
        '{"reward": 0.5, "per_call": {"c1": 1, "c2": 0}, "per_branch": {"c2": 0.25}, "feedback": "half", "tests": 4}'
    )
    command = f"echo looking; cat {tmp_path}/object.json"
    score = await evaluated("command", {"command": command, "reward": "json"}, tmp_path)
    assert (score.reward, score.feedback) == (0.5, "half")
    assert (score.per_call, score.per_branch, score.metadata) == ({"c1": 1.0, "c2": 0.0}, {"c2": 0.25}, {"tests": 4})


@pytest.mark.parametrize(
    "printed",
    [
        "{}",
        '{"reward": null}',
        '{"reward": NaN}',
        '{"reward": "1"}',
        '{"reward": true}',
        "[1]",
        "no",
        '{"reward": 1, "per_call": {"c": 1e999}}',
    ],
)
async def test_an_object_without_a_finite_reward_is_no_reward(printed: str, tmp_path: Path) -> None:
    (tmp_path / "object.json").write_text(printed)
    with pytest.raises(BadReward):
        await evaluated("command", {"command": f"cat {tmp_path}/object.json", "reward": "json"}, tmp_path)


async def test_what_a_failing_command_printed_counts_only_where_that_is_declared(tmp_path: Path) -> None:
    options = {"command": "echo 0.5; exit 1", "reward": "number"}
    with pytest.raises(EvaluationFailed, match="exit code 1"):
        await evaluated("command", options, tmp_path)
    assert (await evaluated("command", {**options, "any_exit": True}, tmp_path)).reward == 0.5


async def test_its_files_replace_those_of_the_agent(tmp_path: Path) -> None:
    options = {"command": "./check.sh", "files": {"check.sh": {"text": "#!/bin/sh\nexit 1\n", "executable": True}}}
    score = await evaluated("command", options, tmp_path, {"check.sh": "#!/bin/sh\nexit 0\n"})
    assert score.reward == 0.0


async def test_a_folder_or_a_file_in_the_way_is_no_failure_of_the_surroundings(tmp_path: Path) -> None:
    options = {"command": "sh checks/check.sh && cat kept", "files": {"checks/check.sh": "test -d more", "more/a": ""}}
    files = {"checks/check.sh/a": "", "more": "a file", "kept": ""}
    assert (await evaluated("command", options, tmp_path, files)).reward == 1.0


async def test_what_is_to_be_removed_is_gone_before_the_files_come(tmp_path: Path) -> None:
    options = {"command": "ls -A checks; test ! -e -f", "files": {"checks/one": ""}, "remove": ["checks", "-f", "not/there"]}
    score = await evaluated("command", options, tmp_path, {"checks/of the agent": "", "-f": ""})
    assert (score.reward, score.feedback) == (1.0, "one")


async def test_variables_and_the_folder_reach_the_command(tmp_path: Path) -> None:
    options = {"command": 'test "$WANTED" = "$(cat here)"', "env": {"WANTED": "x y"}, "workdir": "sub"}
    assert (await evaluated("command", options, tmp_path, {"sub/here": "x y"})).reward == 1.0


async def test_a_command_without_end_is_ended_and_gives_the_reward_that_is_declared_for_it(tmp_path: Path) -> None:
    options = {"command": "sleep 600", "timeout_seconds": 0.2}
    with pytest.raises(EvaluationTimedOut, match=r"still at work after 0\.2 seconds"):
        await evaluated("command", options, tmp_path)
    score = await evaluated("command", {**options, "timeout_reward": -0.5}, tmp_path)
    assert (score.reward, score.metadata) == (-0.5, {"timed_out": True})
