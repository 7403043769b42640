"""Values and advantages from forks, against a game whose values are known exactly."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.pivots.forks import Vine, branch_gains, find_first_failure, find_uncertain, vine
from examples.pivots.turns import find_failed, turns_of
from reconstruct.media import Media
from reconstruct.records import pack_ids, pack_logprobs
from reconstruct.trajectory import Trajectory
from reconstruct.values import estimate
from tests.support.sessions.training_rows import groups, trajectory
from trainer_client.batch import Batch

Ids = tuple[int, ...]


def row(
    name: str, ids: Sequence[int], trained: Sequence[int], reward: float, pivot: int | None = None, **fields: Any
) -> Trajectory:
    """`trained`: the positions under the mask. `pivot`: of a fork, where its own tokens begin."""
    mask = np.zeros(len(ids), dtype=np.int8)
    mask[list(trained)] = 1
    metadata = {} if pivot is None else {"replay": {"session_id": "o", "pivot": pivot}}
    given: dict[str, Any] = {"token_ids": pack_ids(ids), "loss_mask": mask, "logprobs": pack_logprobs(mask * -0.5)}
    return trajectory(name, reward=reward, weight_versions=(), **{"metadata": metadata, **given, **fields})


def credit(*members: Sequence[Trajectory]) -> tuple[Vine, Any]:
    batch = Batch(groups(*members), weight_version=5)
    columns, turns = batch.columns, turns_of(batch.rows)
    return vine(columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows), turns


# By hand


ORIGIN = row("o", [1, 7, 8, 7, 9, 7], [1, 3, 5], reward=0.0)
"""1 | 7 | 8 | 7 | 9 | 7: a prompt and three turns of one token each, with a tool's answer of one token after each."""


def test_a_turn_is_worth_the_next_state_less_its_own() -> None:
    """Forks at turn 2 (after 1 7 8): rewards 1, 0, 1, 1, so 3/4. Forks at turn 3 (after 1 7 8 7 9): 1 and 0, so 1/2."""
    second = [row(f"b{at}", [1, 7, 8, 5], [3], reward, 3) for at, reward in enumerate([1.0, 0.0, 1.0, 1.0])]
    third = [row(f"c{at}", [1, 7, 8, 7, 9, 5], [5], reward, 5) for at, reward in enumerate([1.0, 0.0])]
    found, turns = credit([ORIGIN, row("p", [1, 4], [1], 1.0), row("q", [1, 4], [1], 0.0)], second, third)
    mine = turns.row == 0
    # Before its first turn there is no fork: the mean of the others of its group, (1 + 0) / 2.
    assert found.value[mine].tolist() == [0.5, 0.75, 0.5]
    assert found.samples[mine].tolist() == [2, 4, 2]
    # Deviation of 1, 0, 1, 1: sqrt(3 / 4 / 3) = 1/2; over sqrt(4).
    assert found.error[mine].tolist() == pytest.approx([0.5, 0.25, 0.5])
    assert found.advantages[mine].tolist() == [0.25, -0.25, -0.5]


def test_a_fork_is_compared_with_the_other_forks_of_its_pivot() -> None:
    forks = [row(f"b{at}", [1, 7, 8, 5 + at], [3], reward, 3) for at, reward in enumerate([3.0, 0.0, 1.0])]
    found, _ = credit([ORIGIN], forks)
    assert found.value[3:].tolist() == [0.5, 2.0, 1.5]
    assert found.advantages[3:].tolist() == [2.5, -2.0, -0.5]


def test_turns_between_two_pivots_share_an_advantage() -> None:
    forks = [row(f"c{at}", [1, 7, 8, 7, 9, 5], [5], 1.0, 5) for at in range(2)]
    found, _ = credit([ORIGIN, row("p", [1, 4], [1], 0.5)], forks)
    assert found.advantages[:3].tolist() == [0.5, 0.5, -1.0]


def test_a_rollout_without_forks_and_alone_has_no_advantage() -> None:
    found, _ = credit([ORIGIN])
    assert found.advantages.tolist() == [0, 0, 0] and np.isnan(found.value).all() and not found.samples.any()


@pytest.mark.case(88)
def test_forks_of_a_fork_speak_for_its_own_states_alone() -> None:
    """o: 1 7 8 7 9 7. f forks it at turn 2 and says 5; g and h fork f at its next turn."""
    fork = row("f", [1, 7, 8, 5, 9, 6], [3, 5], 0.0, 3)
    deeper = [row(name, [1, 7, 8, 5, 9, 2], [5], reward, 5) for name, reward in (("g", 1.0), ("h", 0.5))]
    found, turns = credit([ORIGIN], [fork, row("i", [1, 7, 8, 5], [3], 1.0, 3)], deeper)
    by_row = {index: np.flatnonzero(turns.row == index).tolist() for index in range(5)}
    # The origin's second turn: f and i, not what was sampled after f's own.
    assert found.value[by_row[0][1]] == 0.5 and found.samples[by_row[0][1]] == 2
    # f's first turn: i alone; its second: g and h.
    assert found.value[by_row[1]].tolist() == [1.0, 0.75]
    assert found.advantages[by_row[1]].tolist() == [-0.25, -0.75]


def test_a_fork_at_the_pivot_of_a_fork_is_another_sample_of_the_same_state() -> None:
    forks = [row("f", [1, 7, 8, 5], [3], 0.0, 3), row("g", [1, 7, 8, 6], [3], 1.0, 3)]
    again = [row("h", [1, 7, 8, 2], [3], 1.0, 3)]
    found, _ = credit([ORIGIN], forks, again)
    assert found.value[1] == pytest.approx(2 / 3) and found.samples[1] == 3


def test_a_fork_that_diverged_or_another_models_is_no_sample() -> None:
    diverged = row("d", [1, 7, 8, 5], [3], 9.0, metadata={"replay": {"session_id": "o", "pivot": None}})
    found, _ = credit([ORIGIN], [row("f", [1, 7, 8, 5], [3], 1.0, 3), diverged])
    assert found.value[1] == 1.0 and found.samples[1] == 1 and math.isnan(found.error[1])


def test_a_state_after_other_results_is_another_state() -> None:
    """Under the policy `minted` a fork may have seen another tool result: 6 where the origin saw 8."""
    found, _ = credit([ORIGIN, row("p", [1, 4], [1], 1.0)], [row("f", [1, 7, 6, 5], [3], 9.0, 3)])
    assert found.value[:3].tolist() == [1.0, 1.0, 1.0]


def test_the_same_ids_of_another_image_are_another_state() -> None:
    ids, seen = [1, 60, 60, 7, 8, 7], (Media("a" * 64, "image", 1, 2),)
    origin = row("o", ids, [3, 5], 0.0, media=seen)
    same, other = (
        row(name, [*ids[:5], 5], [5], reward, 5, media=tuple(replace(each, digest=digest * 64) for each in seen))
        for name, reward, digest in (("f", 1.0, "a"), ("g", 9.0, "b"))
    )
    found, _ = credit([origin], [same], [other])
    assert found.value[1] == 1.0 and found.samples[1] == 1


def test_rewards_that_are_all_alike_have_no_error_and_none_is_no_value() -> None:
    assert str(estimate([1, 1, 0, 0])) == "0.5 ± 0.29" and str(estimate([2])) == "2"
    assert estimate([1.0] * 3).error == 0 and math.isnan(estimate([]).mean) and estimate([]).samples == 0
    with pytest.raises(ValueError, match="finite"):
        estimate([1.0, math.nan])


# A game: three moves, 1 or 2, each answered with 8 or 9


@dataclass(frozen=True)
class Game:
    """A move of 1 is made with chance 1/4 at first, then 1/2, then 3/4; an answer of 8 comes with chance 3/4 after a 1, else 1/2. It is won
    with 1 if there were more 1s and 8s than others."""

    start: Ids = (0,)

    def chances(self, state: Ids) -> list[tuple[float, Ids]]:
        """What a turn may come to: the move and its answer."""
        one = (len(state) // 2 + 1) / 4
        moves = [(one, 1, 0.75), (1 - one, 2, 0.5)]
        return [(p * q, (*state, move, said)) for p, move, eight in moves for q, said in ((eight, 8), (1 - eight, 9))]

    def over(self, state: Ids) -> bool:
        return len(state) == len(self.start) + 6

    def reward(self, state: Ids) -> float:
        return float(sum(each in (1, 8) for each in state) > 3)

    def play(self, state: Ids, draw: random.Random) -> Ids:
        while not self.over(state):
            chances = self.chances(state)
            (state,) = draw.choices([each for _, each in chances], [chance for chance, _ in chances])
        return state


GAME = Game()


@cache
def value(state: Ids) -> float:
    """What the policy gets on average from here, exactly."""
    if GAME.over(state):
        return GAME.reward(state)
    return sum(chance * value(after) for chance, after in GAME.chances(state))


def played(name: str, state: Ids, pivot: int | None = None) -> Trajectory:
    own = len(GAME.start) if pivot is None else pivot
    return row(name, state, range(own, len(state), 2), GAME.reward(state), pivot)


def states_of(state: Ids) -> Iterator[Ids]:
    """Those that its moves were made in."""
    return (state[:length] for length in range(len(GAME.start), len(state), 2))


@pytest.mark.case(90)
def test_monte_carlo_values_agree_with_the_exact_ones_within_their_error() -> None:
    """An origin, 2,000 forks at each of its calls, and 2,000 of one fork's last call.

    The rewards of n forks are independent and in [0, 1], so by Hoeffding's inequality a mean is off by e with a chance of at most
    2 exp(-2 n e²): for four states together at most 1e-6 where e = sqrt(ln(2 * 4 / 1e-6) / (2 n)) = 0.063. That e holds for any game;
    the errors that are stated must cover the distance, too, with 5 of them (normal: a chance of 6e-7 per state).
    """
    draw, each = random.Random(7), 2000
    origin = GAME.play(GAME.start, draw)
    first = next(each for each in iter(lambda: GAME.play(origin[:3], draw), None) if each[:5] != origin[:5])
    branched = [*states_of(origin), first[:5]]
    assert len(set(branched)) == 4
    forks = [
        [played(f"{number}.{at}", GAME.play(state, draw), len(state)) for at in range(each)]
        for number, state in enumerate(branched)
    ]
    found, turns = credit([played("o", origin), played("f", first, 3)], *forks)
    bound = math.sqrt(math.log(2 * len(branched) / 1e-6) / (2 * each))
    mine = [*np.flatnonzero(turns.row == 0).tolist(), int(np.flatnonzero(turns.row == 1)[-1])]
    for turn, state in zip(mine, branched, strict=True):
        off = abs(found.value[turn] - value(state))
        assert off <= bound and off <= 5 * found.error[turn]
        mean = found.value[turn]
        # Of zeros and ones, n (mean - mean²) is the sum of squares.
        assert found.error[turn] == pytest.approx(math.sqrt(mean * (1 - mean) / (found.samples[turn] - 1)))
    for turn, state, after in zip(mine[:3], branched[:3], [*branched[1:3], origin], strict=True):
        assert abs(found.advantages[turn] - (value(after) - value(state))) <= 2 * bound


@pytest.mark.case(90)
def test_where_forks_are_as_frequent_as_they_are_likely_values_are_exact() -> None:
    """Every course of the game from a state, as often as its chance in 4,096ths says: then nothing is left to chance."""

    def courses(state: Ids, times: int) -> list[Ids]:
        if GAME.over(state):
            return [state] * times
        return [each for chance, after in GAME.chances(state) for each in courses(after, round(times * chance))]

    origin = (0, 1, 8, 2, 9, 1, 9)
    branched = list(states_of(origin))
    forks = [
        [played(f"{number}.{at}", course, len(state)) for at, course in enumerate(courses(state, 4096))]
        for number, state in enumerate(branched)
    ]
    assert [len(each) for each in forks] == [4096] * 3
    found, turns = credit([played("o", origin)], *forks)
    mine = turns.row == 0
    exact = [value(state) for state in branched]
    np.testing.assert_allclose(found.value[mine], exact, rtol=0, atol=1e-12)
    np.testing.assert_allclose(found.advantages[mine], np.diff([*exact, GAME.reward(origin)]), rtol=0, atol=1e-6)


@given(st.integers(0, 10**6))
def test_the_advantages_of_a_rollout_add_up_to_its_reward_less_the_first_value(seed: int) -> None:
    draw = random.Random(seed)
    origin = GAME.play(GAME.start, draw)
    pivots = draw.sample(list(states_of(origin)), draw.randint(0, 3))
    forks = [[played(f"{len(state)}.{at}", GAME.play(state, draw), len(state)) for at in range(2)] for state in pivots]
    found, turns = credit([played("o", origin), played("p", GAME.play(GAME.start, draw))], *forks)
    mine = np.flatnonzero(turns.row == 0)
    # The turns between two pivots share theirs, so of each stretch one is added.
    begins = [0, *[at for at in (1, 2) if origin[: 1 + 2 * at] in pivots]]
    assert found.advantages[mine[begins]].sum() == pytest.approx(GAME.reward(origin) - found.value[mine[0]], abs=1e-6)


# Without forks: where rollouts of a group part


def test_a_branch_gains_what_its_rollouts_got_above_all_in_its_state() -> None:
    """Four rollouts from state 1: two say 7 (rewards 1 and 0), two say 6 (0, 0). Mean 1/4: 7 gains 1/4, 6 loses 1/4, times 2 / (2 + 1).
    After 1 7 8 one says 3 (reward 1), one says 4 (0): mean 1/2, half of which counts, times 1 / (1 + 1)."""
    rows = [
        row("a", [1, 7, 8, 3], [1, 3], 1.0),
        row("b", [1, 7, 8, 4], [1, 3], 0.0),
        row("c", [1, 6], [1], 0.0),
        row("d", [1, 6, 9, 5], [1, 3], 0.0),
    ]
    batch = Batch(groups(rows), weight_version=5)
    columns, turns = batch.columns, turns_of(batch.rows)
    given_ = (columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows)
    sixth = 1 / 6
    assert branch_gains(*given_, discount=0.0).tolist() == pytest.approx([sixth, 0.25, sixth, -0.25, -sixth, -sixth, 0])
    assert branch_gains(*given_).tolist() == pytest.approx([sixth + 0.25, 0.25, sixth - 0.25, -0.25, -sixth, -sixth, 0])
    assert branch_gains(*given_, discount=0.0, prior=0.0).tolist() == pytest.approx([0.25, 0.5, 0.25, -0.5, -0.25, -0.25, 0])


def test_branches_of_different_groups_are_not_compared() -> None:
    batch = Batch(groups([row("a", [1, 7], [1], 1.0)], [row("b", [1, 6], [1], 0.0)]), weight_version=5)
    columns, turns = batch.columns, turns_of(batch.rows)
    assert not branch_gains(columns.rewards, columns.group_index, columns.rollout_index, turns, batch.rows).any()


# Pivots


def test_the_pivots_of_a_rollout_are_where_its_entropy_rose_most() -> None:
    """Rollout 0: 2, 5, 1, 4 (rises 3, -1, 2 over the first). Rollout 1: 3, 3. Rollout 2 never rises."""
    entropy, rollouts = [2, 5, 1, 4, 3, 3.5, 9, 1], [0, 0, 0, 0, 1, 1, 2, 2]
    assert find_uncertain(entropy, rollouts).tolist() == [1, 5]
    assert find_uncertain(entropy, rollouts, count=2).tolist() == [1, 3, 5]
    assert find_uncertain([1, math.nan, 2], [0, 0, 0], count=2).tolist() == [2]


def test_a_rollouts_first_failure_is_its_pivot() -> None:
    assert find_first_failure([0, 1, 1, 0, 0, 1], [4, 4, 4, 2, 2, 2]).tolist() == [1, 5]
    assert find_first_failure([False, False], [0, 0]).tolist() == []
    for find in (find_uncertain, find_first_failure):
        with pytest.raises(ValueError, match="shapes"):
            find([0, 1], [0])


def test_a_turn_failed_if_its_reward_says_so_or_its_tool_call_cannot_be_read() -> None:
    """0 | 11 12 | 0 | 13: call `one` has a reward, call `two` an unreadable tool call."""
    spans = {"one": [1, 3], "two": [4, 5]}
    ids, trained = [0, 11, 12, 0, 13], [1, 2, 4]
    bad = row("a", ids, trained, 1.0, metadata={"per_call_rewards": {"one": -1.0}, "per_call_spans": spans})
    unread = row("b", ids, trained, 1.0, metadata={"invalid_tool_calls": ["two"], "per_call_spans": spans})
    rows = [bad, unread, row("c", ids, trained, 1.0)]
    assert find_failed(rows, turns_of(rows)).tolist() == [True, False, False, True, False, False]
