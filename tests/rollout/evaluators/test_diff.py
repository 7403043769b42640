"""Kind `diff`: expected files as rewards."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

from rollout.evaluators.base import BadEvaluator
from rollout.evaluators.catalogue import load
from rollout.evaluators.diff import name_of
from tests.support.runtimes.evaluations import case_of, check, evaluated, plain_runtime


async def test_the_part_of_files_that_are_equal_is_the_reward(tmp_path: Path) -> None:
    options = {
        "files": {"a.txt": "one\n", "sub/b.bin": {"base64": base64.b64encode(b"\x00\xff").decode()}, "c.txt": "", "d": "x"}
    }
    score = await evaluated("diff", options, tmp_path, {"a.txt": "one\n", "sub/b.bin": b"\x00\xff", "c.txt": "more"})
    assert score.reward == 0.5
    assert score.feedback.splitlines()[0] == "2 of 4 paths are as expected."
    assert "+more" in score.feedback
    assert "d is not there, or is no file" in score.feedback


async def test_in_mode_all_one_difference_is_enough(tmp_path: Path) -> None:
    options = {"files": {"a": "1", "b": "2"}, "mode": "all"}
    assert (await evaluated("diff", options, tmp_path, {"a": "1", "b": "3"})).reward == 0.0
    assert (await evaluated("diff", options, tmp_path, {"a": "1", "b": "2"})).reward == 1.0


@pytest.mark.parametrize(
    ("found", "rewards"),
    [
        ("a  b\nc\n", {"exact": 1.0, "trailing": 1.0, "any": 1.0}),
        ("a  b  \r\nc\n\n", {"exact": 0.0, "trailing": 1.0, "any": 1.0}),
        ("a b c", {"exact": 0.0, "trailing": 0.0, "any": 1.0}),
        ("ab c", {"exact": 0.0, "trailing": 0.0, "any": 0.0}),
        ("\na  b\nc\n", {"exact": 0.0, "trailing": 0.0, "any": 1.0}),
    ],
)
async def test_white_space_counts_as_far_as_is_declared(found: str, rewards: dict[str, float], tmp_path: Path) -> None:
    for whitespace, reward in rewards.items():
        options = {"files": {"f": "a  b\nc\n"}, "whitespace": whitespace}
        assert (await evaluated("diff", options, tmp_path, {"f": found})).reward == reward


async def test_what_should_be_gone_is_looked_for(tmp_path: Path) -> None:
    score = await evaluated("diff", {"absent": ["old.py", "old"]}, tmp_path, {"old/x": "1"})
    assert (score.reward, score.feedback) == (0.5, "1 of 2 paths are as expected.\nold should not be there")


async def test_a_link_or_a_folder_is_no_file(tmp_path: Path) -> None:
    """An agent cannot have a file of the evaluator's machine compared by leaving a link to it."""
    options = {"files": {"link": "secret", "folder": ""}}
    (tmp_path / "secret").write_text("secret")
    async with plain_runtime(tmp_path) as runtime:
        (Path(runtime.workdir) / "link").symlink_to(tmp_path / "secret")
        (Path(runtime.workdir) / "folder").mkdir()
        assert (await load("diff").evaluate(case_of(runtime, options, tmp_path))).reward == 0.0


async def test_paths_may_be_absolute(tmp_path: Path) -> None:
    files = {f"{tmp_path}/work/in": "1", f"{tmp_path}/elsewhere/out": "2"}
    assert (await evaluated("diff", {"files": files}, tmp_path, files)).reward == 1.0


async def test_great_files_are_not_compared_line_by_line(tmp_path: Path) -> None:
    score = await evaluated("diff", {"files": {"f": "a\n" * 100_000}}, tmp_path, {"f": "b\n" * 100_000})
    assert score.feedback.splitlines()[1] == "f differs: 200000 bytes were expected, 200000 are there"


@pytest.mark.parametrize(
    ("path", "name"),
    [("a/../b", "b"), ("/w/a", "a"), ("/w", "."), (".", "."), ("/wide", "wide"), ("../x", "x"), ("/", "")],
)
def test_names_in_archives_are_relative_to_the_workdir(path: str, name: str) -> None:
    assert name_of(path, "/w") == name


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "option 'files' is missing, and so is 'absent'"),
        ({"files": []}, "option 'files' must be an object"),
        ({"files": {"a": None}}, "option 'files' must give 'a' a text"),
        ({"files": {"a": {"text": "b", "base64": ""}}}, "option 'files' must give 'a' a text"),
        ({"files": {"a": ""}, "whitespace": "none"}, "option 'whitespace' cannot be 'none'"),
        ({"absent": "x", "mode": "any"}, "option 'mode' cannot be 'any'"),
        ({"absent": "x", "fils": {}}, "there is no option 'fils'"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, Any], said: str) -> None:
    with pytest.raises(BadEvaluator, match=said):
        check("diff", options)
