"""The demo's verdict: the numbers it adds up, and what it takes to fail."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from examples.demo.engine_use import Stint
from examples.demo.report import draw_run, verdict_table, write_verdict
from examples.demo.verdict import Expectation, SessionFacts, Verdict, judge

PUSHED = Expectation(push=True, rise=0.25, difference=1e-4)
NOT_PUSHED = Expectation(push=False, rise=0.12, difference=1e-4)


def session(
    masks: list[list[int]], versions: list[list[list[int]]], quarantined: int = 0, *, trained: bool = True
) -> SessionFacts:
    rows = [{"loss_mask": mask, "weight_versions": spans} for mask, spans in zip(masks, versions, strict=True)]
    sampled = sum(map(sum, masks)) + quarantined
    held = [{"call_id": "c", "tokens": quarantined, "reason": "not_delivered"}] if quarantined else []
    accounting = {"sampled_tokens": sampled, "exported_tokens": sum(map(sum, masks)), "quarantined": held}
    return SessionFacts(2, [Stint("engine:1", 0.0, 4.0)], rows, accounting, trained)


def verdict(**changes: Any) -> Verdict:
    """Two conversations, one in two rows and with two tokens in quarantine; every check holds."""
    sessions = [
        session([[0, 1, 1, 0, 1]], [[[0, 1, 3], [1, 4, 5]]]),
        session([[0, 1], [0, 0, 1]], [[[2, 1, 2]], [[3, 2, 3], [4, 3, 4], [5, 4, 5]]], quarantined=2),
    ]
    rewards, ages = [0.3, 0.3, 0.4, 0.4, 0.8, 0.8, 0.9, 0.9], {1: 3, 0: 1}
    found = judge(sessions, rewards, ages, agent_tokens=7, trained_tokens=5, recomputed_tokens=5, largest_difference=2e-6)
    return replace(found, **changes)


def test_sessions_are_added_up() -> None:
    found = verdict()
    assert (found.sessions, found.calls, found.rows, found.rows_per_conversation) == (2, 4, 3, 1.5)
    assert (found.sampled_tokens, found.exported_tokens, found.quarantined_tokens) == (7, 5, 2)
    assert found.quarantine_reasons == {"not_delivered": 2}
    assert (found.weight_versions, found.mixed_rows) == ([0, 1, 2, 3, 4, 5], 2)
    assert found.rise == pytest.approx(0.85 - 0.35)
    assert (found.ages, found.idle, found.untrained_tokens) == ({0: 1, 1: 3}, {"engine:1": 0.0}, 0)


def test_tokens_that_no_step_took_are_counted_apart() -> None:
    sessions = [session([[0, 1, 1]], [[[0, 1, 3]]]), session([[0, 1]], [[[0, 1, 2]]], trained=False)]
    found = judge(sessions, [0.5], {0: 1}, agent_tokens=3, trained_tokens=2, recomputed_tokens=3, largest_difference=0.0)
    assert (found.exported_tokens, found.trained_tokens, found.untrained_tokens) == (3, 2, 1)
    assert found.failures(replace(PUSHED, asynchronous=True)) == []
    assert found.failures(PUSHED) == ["no step took 1 of the tokens"]


def test_it_passes_when_every_check_holds() -> None:
    assert verdict().failures(PUSHED) == []


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"exported_tokens": 4, "trained_tokens": 4, "recomputed_tokens": 4}, "exported or quarantined"),
        ({"ages": {1: 4, 3: 1}}, "a group 3 versions old, allowed are 2"),
        ({"idle": {"engine:1": 0.1, "engine:2": 0.1}}, "2 replicas sampled, 1 were expected"),
        ({"agent_tokens": 8}, "the agent was told of 8"),
        ({"agent_tokens": 4}, "the agent was told of 4"),
        ({"recomputed_tokens": 4}, "4 lie in a weight version's span"),
        ({"largest_difference": 1e-3}, "1.00e-03 off"),
        ({"largest_difference": float("nan")}, "nan off"),
        ({"trained_tokens": 4}, "the trainer was given 4 tokens"),
        ({"weight_versions": [0, 1]}, "2 weight versions"),
        ({"differing_tensors": ["w"]}, "the engines hold other bits than the trainer in w"),
        ({"rewards": [0.3] * 8}, "the reward rose by 0.000"),
    ],
)
def test_one_number_that_is_off_is_one_failure(changes: dict[str, Any], sentence: str) -> None:
    (failure,) = verdict(**changes).failures(PUSHED)
    assert sentence in failure


def test_a_reply_that_never_reached_the_agent_may_be_in_quarantine() -> None:
    assert verdict(agent_tokens=5).failures(PUSHED) == []


def test_nothing_sampled_is_a_failure() -> None:
    empty = judge([], [], {}, agent_tokens=0, trained_tokens=0, recomputed_tokens=0, largest_difference=0.0)
    assert "no token was sampled" in empty.failures(PUSHED)


def test_with_too_few_steps_for_two_ends_no_rise_is_asked_for() -> None:
    assert verdict(rewards=[0.3] * 7).failures(PUSHED) == []


def test_without_the_push_the_curve_must_stay_flat() -> None:
    flat = verdict(weight_versions=[0], rewards=[0.3, 0.35] * 4)
    assert flat.failures(NOT_PUSHED) == []
    assert len(replace(flat, rewards=[0.3] * 4 + [0.9] * 4).failures(NOT_PUSHED)) == 1
    assert len(replace(flat, weight_versions=[0, 1]).failures(NOT_PUSHED)) == 1


@pytest.mark.case(80)
def test_with_shuffled_rewards_the_weights_are_pushed_and_the_curve_must_stay_flat() -> None:
    shuffled = replace(PUSHED, rise=0.12, shuffled=True)
    assert verdict(rewards=[0.3, 0.35] * 4).failures(shuffled) == []
    (failure,) = verdict().failures(shuffled)
    assert failure == "the rewards were shuffled, yet the reward changed by 0.500"
    assert len(verdict(rewards=[0.3] * 8, weight_versions=[0]).failures(shuffled)) == 1


def test_enough_held_out_exercises_tell_the_rise_in_place_of_the_steps() -> None:
    """A step has a few exercises of its own: its mean says little."""
    steady = verdict(rewards=[0.3] * 8, held_out=[[0.0] * 24, [0.0] * 12 + [1.0] * 12])
    assert steady.failures(PUSHED) == []
    assert steady.course == "Of 24 held-out exercises 0.0% were solved before and 50.0% after 8 steps."
    (failure,) = replace(steady, held_out=[[1.0] * 24, [1.0] * 24]).failures(PUSHED)
    assert failure == "the reward rose by 0.000, at least 0.25 was expected"
    assert len(replace(steady, weight_versions=[0]).failures(NOT_PUSHED)) == 1
    assert len(replace(steady, held_out=[[0.0] * 8, [1.0] * 8]).failures(PUSHED)) == 1, "too few: the steps tell"


def test_the_numbers_are_left_as_json_and_shown_as_a_table(tmp_path: Path) -> None:
    write_verdict(tmp_path / "verdict.json", verdict(), PUSHED, 12.34)
    record = json.loads((tmp_path / "verdict.json").read_text())
    assert record["passed"] is True and record["failures"] == []
    assert (record["sampled_tokens"], record["rows_per_conversation"], record["seconds"]) == (7, 1.5, 12.3)
    console = Console(width=100)
    with console.capture() as shown:
        console.print(verdict_table(verdict(), PUSHED))
    text = shown.get()
    assert "2 (not_delivered: 2)" in text and "2.0e-06 (< 0.0001)" in text and "6 (0 to 5)" in text
    assert "0:25% 1:75% (≤ 2)" in text


def test_the_run_is_drawn(tmp_path: Path) -> None:
    draw_run(tmp_path / "reward.png", [[0.0, 1.0], [0.5, 1.0], [1.0, 1.0]], verdict(), PUSHED, chance=1 / 3)
    assert (tmp_path / "reward.png").read_bytes().startswith(b"\x89PNG")


def test_steps_and_ages_are_drawn_as_whole_numbers_even_if_there_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr("matplotlib.pyplot.close", drawn.append)
    draw_run(tmp_path / "reward.png", [[0.0, 1.0]], verdict(ages={0: 4}), PUSHED, chance=None)
    ticks = [tick for axes in drawn[0].axes for tick in axes.get_xticks()]
    assert {0.0, 1.0} <= set(ticks) and all(tick == round(tick) for tick in ticks), ticks


@pytest.mark.parametrize(
    ("rewards", "course"),
    [
        ([0.25] * 4 + [0.75] * 4, "The reward rose from 0.250 to 0.750 over 8 steps (means of the first 4 and the last 4)."),
        ([0.5] * 8, "The reward did not rise: it went from 0.500 to 0.500 over 8 steps (means of the first 4 and the last 4)."),
        ([0.25, 0.5], "The reward was 0.250 in the first of 2 steps and 0.500 in the last: too few to speak of a rise."),
    ],
)
def test_the_verdict_says_in_words_whether_the_reward_rose(rewards: list[float], course: str) -> None:
    assert verdict(rewards=rewards).course == course
