"""What honest sessions feel beside a hostile one is told by rounds, so that one bad moment of the machine does not decide it."""

from __future__ import annotations

from collections import Counter

from benchmarks.hostile import Felt, figures, tables


def test_percentiles_are_medians_over_the_rounds_and_the_worst_is_of_all() -> None:
    rounds = [
        Felt([1.0, 2.0, 3.0], [4.0], [100.0], Counter({"400": 2})),
        Felt([10.0, 20.0, 30.0], [50.0], [90.0], Counter({"400": 1, "413": 1})),
        Felt([2.0, 3.0, 4.0], [5.0], [110.0]),
    ]
    found = figures(rounds)
    assert found["honest_calls"] == 9
    assert found["p50_ms"] == {"median": 3, "least": 2, "most": 20}
    assert (found["worst_ms"], found["worst_healthz_ms"], found["most_resident_mib"]) == (30, 50, 110)
    assert found["hostile_answers"] == {"400": 3, "413": 1}


def test_the_table_says_how_much_longer_honest_calls_take_beside_a_hostile_key() -> None:
    alone, beside = figures([Felt([2.0], [1.0], [100.0])]), figures([Felt([3.0], [4.0], [100.0])])
    (grid,) = tables({"seconds": 60.0, "rounds": 1, "memory_mib": 1024, "alone": alone, "beside": beside, "after": alone})
    rows = {row[0]: row[1:] for row in grid.rows}
    assert rows["beside a hostile key"] == ("1", "3 (3 to 3)", "3 (3 to 3)", "3", "4", "100")
    assert rows["beside / alone"][1:3] == ("1.5x", "1.5x")
