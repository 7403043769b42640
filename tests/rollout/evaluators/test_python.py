"""Kind `python`: functions of the user's own as rewards."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from contract.errors import NoAnswer
from rollout.evaluators.base import BadReward, Case, EvaluationFailed, Score
from rollout.evaluators.catalogue import load
from rollout.runtimes.base import RuntimeFailed
from tests.support.runtimes.evaluations import RUN, case_of, check, evaluated

HERE = __name__


def by_session(case: Case) -> dict[str, Any]:
    assert threading.current_thread() is not threading.main_thread()
    return {"reward": case.options["arguments"]["reward"], "per_call": {"c": 1}, "feedback": case.run.session_id}


async def by_file(case: Case) -> float:
    done = await case.runtime.exec(["cat", "reward"], timeout_seconds=60)
    return float(done.stdout)


def by_either(case: Case) -> Any:
    """A plain function that gives an awaitable."""
    return by_file(case)


class Grader:
    async def __call__(self, case: Case) -> Score:
        return Score(0.25, per_branch={"b": 0.5})

    @staticmethod
    def method(case: Case) -> int:
        return 2


grader = Grader()


def gives_nothing(case: Case) -> None:
    return None


async def by_judge(case: Case) -> float:
    return float(await case.ask("judge", [{"role": "user", "content": "how good?"}], {}))


def raises(case: Case) -> float:
    raise {"exit": SystemExit(3), "stop": StopIteration(), "key": KeyError("k"), "runtime": RuntimeFailed("gone")}[
        case.options["arguments"]["what"]
    ]


async def test_a_plain_function_is_called_in_a_thread_with_the_case(tmp_path: Path) -> None:
    score = await evaluated("python", {"entry": f"{HERE}:by_session", "arguments": {"reward": 0.5}}, tmp_path)
    assert score == Score(0.5, {"c": 1.0}, feedback=RUN.session_id)


@pytest.mark.parametrize("function", ["by_file", "by_either"])
async def test_a_coroutine_function_may_work_in_the_runtime(function: str, tmp_path: Path) -> None:
    score = await evaluated("python", {"entry": f"{HERE}:{function}"}, tmp_path, {"reward": "0.75"})
    assert score.reward == 0.75


async def test_anything_that_can_be_called_will_do(tmp_path: Path) -> None:
    assert (await evaluated("python", {"entry": f"{HERE}:grader"}, tmp_path)) == Score(0.25, per_branch={"b": 0.5})
    assert (await evaluated("python", {"entry": f"{HERE}:Grader.method"}, tmp_path)).reward == 2.0


async def test_nothing_is_no_reward(tmp_path: Path) -> None:
    with pytest.raises(BadReward, match=f"what {HERE}:gives_nothing gave is None, which is no number"):
        await evaluated("python", {"entry": f"{HERE}:gives_nothing"}, tmp_path)


@pytest.mark.parametrize(
    ("what", "said"),
    [("exit", "raised SystemExit: 3"), ("stop", "raised RuntimeError: StopIteration"), ("key", "raised KeyError: 'k'")],
)
async def test_a_function_that_raises_gives_no_reward_and_ends_no_node(what: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(EvaluationFailed, match=said):
        await evaluated("python", {"entry": f"{HERE}:raises", "arguments": {"what": what}}, tmp_path)


async def test_a_runtime_that_breaks_is_told_apart_from_a_function_that_does(tmp_path: Path) -> None:
    with pytest.raises(RuntimeFailed, match="gone"):
        await evaluated("python", {"entry": f"{HERE}:raises", "arguments": {"what": "runtime"}}, tmp_path)


async def test_a_judge_that_is_away_is_told_apart_from_a_function_that_breaks(tmp_path: Path) -> None:
    """It was taken for a failure of the function, so that the rollout ended instead of being tried again."""

    async def away(model: str, messages: object, sampling: object) -> str:
        raise NoAnswer("the service is away")

    with pytest.raises(NoAnswer, match="the service is away"):
        await evaluated("python", {"entry": f"{HERE}:by_judge"}, tmp_path, ask=away)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("not_there:f", "cannot be loaded on this node: ModuleNotFoundError"),
        (f"{HERE}:f", "cannot be loaded on this node: AttributeError"),
        (f"{HERE}:HERE", "is str, which cannot be called"),
    ],
)
async def test_what_a_node_lacks_is_named(entry: str, said: str, tmp_path: Path) -> None:
    check("python", {"entry": entry})
    with pytest.raises(EvaluationFailed, match=said):
        await load("python").evaluate(case_of(None, {"entry": entry}, tmp_path))
