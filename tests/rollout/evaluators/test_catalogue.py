"""The catalogue of evaluators, and what is taken for a reward."""

from __future__ import annotations

from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from contract.attempts import AttemptId, Failure, Verdict
from contract.tasks import EvaluatorSpec
from proxy.store.keys import pack_versioned
from proxy.store.tasks.values import unpack_checked
from rollout.attempts import RolloutFailed
from rollout.evaluation import Evaluation
from rollout.evaluators import catalogue
from rollout.evaluators.base import BadEvaluator, BadReward, EvaluationFailed, Score, parse_reward, parse_score, shorten
from rollout.logs import AttemptLogs
from tests.support.distributions import Distributions
from tests.support.runtimes.evaluations import RUN, TASK, check, evaluated, nobody_asks
from tests.support.runtimes.plain_runtime import PlainRuntime

BROUGHT = """
from rollout.evaluators.base import Score

class Constant:
    name = "constant"
    needs_runtime = False
    def check(self, spec, task): pass
    async def evaluate(self, case): return Score(**case.options)

class Half:
    pass
"""


@pytest.fixture
def installed(distributions: Distributions) -> None:
    """A package that brings evaluators."""
    points = ("constant = brought_evaluators:Constant", "half = brought_evaluators:Half", "lost = not_there:X")
    distributions.install("brought", "verbatim.evaluators", *points, brought_evaluators=BROUGHT)


@pytest.mark.parametrize("name", catalogue.list_names())
def test_every_kind_is_named_as_it_is_listed(name: str) -> None:
    assert catalogue.load(name).name == name
    assert catalogue.load(name) is catalogue.load(name)


def test_an_unknown_kind_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadEvaluator, match=r"no evaluator 'comand': choose one of command, harbor, .*pytest"):
        catalogue.load("comand")


async def test_installed_packages_bring_kinds(installed: None, tmp_path: Path) -> None:
    assert {"constant", "half", "command"} <= {*catalogue.list_names()}
    assert (await evaluated("constant", {"reward": 0.5}, tmp_path)).reward == 0.5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lost", "the evaluator 'lost' .not_there:X of brought 1.0. cannot be loaded: ModuleNotFoundError"),
        ("half", "the evaluator 'half' .* cannot be loaded: AttributeError"),
    ],
)
def test_a_kind_that_cannot_be_used_says_why(installed: None, name: str, said: str) -> None:
    with pytest.raises(BadEvaluator, match=said):
        check(name, {})


@pytest.mark.parametrize(
    "given", [{"reward": float("nan")}, {"reward": None}, {"reward": "1"}, {"reward": 1, "per_call": {"c": float("inf")}}]
)
async def test_what_a_package_gives_is_a_reward_if_all_of_it_is(installed: None, tmp_path: Path, given: dict[str, Any]) -> None:
    """All of it is posted to the session, which takes only what is finite."""
    parts: Any = SimpleNamespace(judge=SimpleNamespace(ask=nobody_asks))
    attempt = AttemptId("t", 0, 1)
    spec = EvaluatorSpec("constant", given)
    evaluation = Evaluation(parts, replace(TASK, evaluator=spec), spec, attempt, AttemptLogs("n", tmp_path, attempt))
    with pytest.raises(RolloutFailed) as raised:
        await evaluation.score(RUN, PlainRuntime(tmp_path))
    assert raised.value.failure == Failure.BAD_REWARD


@pytest.mark.parametrize("value", [1, 0.5, -2.0, np.float32(0.5), np.int64(3), Fraction(1, 2)])
def test_any_real_number_is_a_reward(value: Any) -> None:
    assert parse_reward(value, "it") == float(value)


@pytest.mark.parametrize(
    "value", [None, True, "1", float("nan"), float("inf"), np.float32("nan"), 10**400, [1.0], Decimal("1"), 1j, np.bool_(True)]
)
def test_nothing_else_is_a_reward(value: Any) -> None:
    with pytest.raises(BadReward, match=r"^it is"):
        parse_reward(value, "it")


def test_metadata_that_can_be_written_as_json_can_be_stored_and_read_back() -> None:
    """Keys that are numbers could not be read again, and a number of numpy's made of a good reward a bad one."""
    metadata = parse_score({"reward": 1, "metadata": {1: "a", "mean": np.float64(0.5), "pair": (1, 2)}}, "it").metadata
    assert metadata == {"1": "a", "mean": 0.5, "pair": [1, 2]}
    verdict = Verdict("completed", 1.0, metadata=metadata)
    assert unpack_checked(pack_versioned(verdict), Verdict) == verdict


@pytest.mark.parametrize(
    "value",
    [
        {"reward": 1, "per_call": [1]},
        {"reward": 1, "feedback": ["a"]},
        {"reward": 1, "metadata": "a"},
        {"reward": 1, "metadata": {"a": float("nan")}},
        {"reward": 1, "metadata": {"a": object()}},
        {"reward": 1, "note": "\ud800"},
        {"reward": 1, "per_call": {"c": None}},
        {},
    ],
)
def test_an_object_with_something_wrong_in_it_is_no_score(value: Any) -> None:
    with pytest.raises(EvaluationFailed, match=r"of it|it has no field 'reward'"):
        parse_score(value, "it")


def test_a_score_is_taken_as_strictly_as_an_object() -> None:
    assert parse_score(Score(1, {"c": 1}, feedback="good"), "it") == Score(1.0, {"c": 1.0}, feedback="good")
    with pytest.raises(BadReward):
        parse_score(Score(float("nan")), "it")


@given(st.text(st.characters(), max_size=300), st.integers(2, 100))
def test_a_shortened_text_can_be_written_and_is_short(text: str, characters: int) -> None:
    short = shorten(text, characters)
    short.encode()
    assert len(short) <= characters + 40
