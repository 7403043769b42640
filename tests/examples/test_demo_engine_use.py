"""How idle the demo's engines were, and how old its groups: sums a reader can check."""

from __future__ import annotations

import pytest

from examples.demo.ages import mean_age, shares_of
from examples.demo.engine_use import Stint, idle_shares


def test_time_without_a_call_is_idle_and_calls_at_once_count_once() -> None:
    """Ten seconds of two replicas:

    a  ####______   two calls within four seconds
    b  __##__####
    """
    stints = [Stint("a", 0, 3), Stint("a", 1, 4), Stint("b", 2, 4), Stint("b", 6, 10), Stint("b", 7, 8)]
    assert idle_shares(stints) == pytest.approx({"a": 0.6, "b": 0.4})


def test_the_order_of_the_calls_does_not_matter() -> None:
    stints = [Stint("a", 6, 8), Stint("a", 0, 1), Stint("a", 7, 10), Stint("a", 0, 2)]
    assert idle_shares(stints) == idle_shares(reversed(stints)) == pytest.approx({"a": 0.4})


def test_nothing_sampled_is_nobodys_time() -> None:
    assert idle_shares([]) == {}


def test_a_call_is_at_its_replica_after_it_has_waited_for_its_turn() -> None:
    call = {"replica": "a", "started_at": 100.0, "own_seconds": 3.0, "engine_seconds": 2.0}
    assert Stint.of(call) == Stint("a", 103.0, 105.0)


def test_ages_are_told_as_shares_from_the_youngest_on() -> None:
    assert shares_of({2: 1, 0: 3}) == "0:75% 2:25%"
    assert mean_age({2: 1, 0: 3}) == 0.5
