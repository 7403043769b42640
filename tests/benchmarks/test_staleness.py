"""The staleness simulation: engines against sums by hand, and what must hold of every run."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.staleness import CASES, cases_in, compare, main
from benchmarks.staleness_engines import Fleet, Speed
from benchmarks.staleness_run import Machines, Mode, Outcome, Work, simulate

SPEED = Speed(token_seconds=0.01, reply_seconds=0.002, slots=4)
MACHINES = Machines(2, 1, SPEED, rollouts=12, train_seconds=1.0, train_token_seconds=0.001, push_seconds=0.1)
WORK = Work(groups_per_version=3, group_size=2, calls=2, reply_tokens=50, reply_spread=1.0, longest=1000, tool_seconds=0.5)


def run_until_idle(fleet: Fleet) -> list[tuple[Any, Any]]:
    """Replies in the order in which they end, with the second of it."""
    ends = []
    while fleet.next_end < float("inf"):
        now = fleet.next_end
        fleet.move_to(now)
        ends += [(reply, pytest.approx(now)) for reply in fleet.ended()]
    return ends


def test_replies_slow_each_other_down() -> None:
    # One replica, tokens of 1 s + 1 s per reply. Both at 3 s a token until the first ends after 2 tokens: 6 s.
    # Then the other's last token at 2 s: 8 s.
    fleet = Fleet(1, Speed(1.0, 1.0, 2))
    fleet.start(2, "short")
    fleet.start(3, "long")
    assert run_until_idle(fleet) == [("short", 6.0), ("long", 8.0)]
    assert fleet.sampled == pytest.approx(5) and fleet.busy_seconds == pytest.approx(8)


def test_a_reply_waits_for_a_slot() -> None:
    fleet = Fleet(1, Speed(1.0, 0.0, 1))
    fleet.start(2, "first")
    fleet.start(1, "second")
    assert run_until_idle(fleet) == [("first", 2.0), ("second", 3.0)]


def test_replies_go_to_the_emptiest_replica() -> None:
    fleet = Fleet(2, Speed(1.0, 1.0, 9))
    for reply in "abc":
        fleet.start(1, reply)
    assert [len(replica.active) for replica in fleet.replicas] == [2, 1]


def test_a_frozen_replica_loses_the_time_and_keeps_its_replies() -> None:
    fleet = Fleet(1, Speed(1.0, 0.0, 1))
    fleet.start(2, "reply")
    fleet.move_to(1.0)
    fleet.freeze(True)
    assert fleet.next_end == float("inf")
    fleet.move_to(4.0)
    fleet.freeze(False)
    assert run_until_idle(fleet) == [("reply", 5.0)]


def test_one_step_takes_what_it_takes_by_hand() -> None:
    # Two replies of 10 tokens at 0.014 s, 1 s and 20 tokens of training, a push.
    work = Work(1, 2, 1, 10, 0.0, 100)
    machines = replace(MACHINES, replicas=1)
    done = simulate("synchronous", 0, work, machines, steps=1)
    assert done.seconds == pytest.approx(0.14 + 1.02 + 0.1)
    assert done.trainer_use == pytest.approx(1.02 / 1.26)
    assert done.engine_busy == pytest.approx(0.14 / 1.26)
    assert done.engine_use == pytest.approx(20 / (1.26 * SPEED.most))


@pytest.mark.parametrize("mode", ["keep", "wait"])
@pytest.mark.parametrize("seed", range(4))
def test_asynchronous_without_staleness_is_synchronous(mode: Mode, seed: int) -> None:
    plain = simulate("synchronous", 0, WORK, MACHINES, steps=5, seed=seed)
    assert replace(simulate(mode, 0, WORK, MACHINES, steps=5, seed=seed), mode="synchronous") == plain


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(["keep", "wait"]),
    st.integers(0, 4),
    st.integers(0, 99),
    st.integers(1, 4),
    st.integers(1, 3),
    st.floats(0, 1.5),
    st.integers(2, 40),
    st.floats(0.0, 20.0),
)
def test_every_run_keeps_its_bound_and_its_books(
    mode: Mode, bound: int, seed: int, groups: int, calls: int, spread: float, rollouts: int, train: float
) -> None:
    work = Work(groups, 2, calls, 40, spread, 2000, 0.3 * (calls - 1), 1.0)
    done = simulate(mode, bound, work, replace(MACHINES, rollouts=rollouts, train_seconds=train), steps=6, seed=seed)
    assert max(done.staleness) <= bound
    assert sum(done.staleness.values()) == 6 * groups
    assert all(0 <= share <= 1 + 1e-9 for share in (done.engine_use, done.engine_busy, done.trainer_use))
    assert (done.tokens_dropped > 0) == (done.groups_dropped > 0)
    assert done == simulate(mode, bound, work, replace(MACHINES, rollouts=rollouts, train_seconds=train), steps=6, seed=seed)


def with_bound(bound: int, mode: Mode = "keep") -> Outcome:
    return simulate(mode, bound, WORK, MACHINES, steps=40)


def test_staleness_buys_speed_and_partial_rollouts_buy_more() -> None:
    assert with_bound(2).steps_per_hour > 1.2 * with_bound(0).steps_per_hour
    assert with_bound(2).engine_busy > with_bound(0).engine_busy
    long_tail = replace(WORK, reply_spread=1.6, calls=1)
    keep, wait = (simulate(mode, 2, long_tail, MACHINES, steps=40) for mode in ("keep", "wait"))
    assert keep.steps_per_hour > wait.steps_per_hour


def test_shared_machines_sample_and_train_in_turn() -> None:
    shared = MACHINES.shared()
    assert (shared.replicas, shared.rollouts) == (3, 18)
    assert (shared.train_seconds, shared.train_token_seconds) == pytest.approx((1 / 3, 0.001 / 3))


def test_results_are_printed_written_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    case = {
        "name": "mine",
        "kind": "agentic",
        "source": "a test",
        "work": {"groups_per_version": 2, "group_size": 2, "calls": 1},
    }
    case["work"] |= {"reply_tokens": 20, "reply_spread": 1, "longest": 99}  # type: ignore[operator]
    machines = {"replicas": 1, "trainers": 1, "rollouts": 4, "train_seconds": 1, "train_token_seconds": 0, "push_seconds": 0.1}
    case["machines"] = machines | {"speed": {"token_seconds": 0.01, "reply_seconds": 0.001, "slots": 4}}
    times, results, picture = tmp_path / "times.json", tmp_path / "out.json", tmp_path / "out.png"
    times.write_text(json.dumps({"cases": [case]}))
    main(
        [
            "--times",
            str(times),
            "--bounds",
            "0,1",
            "--steps",
            "4",
            "--seeds",
            "2",
            "--json",
            str(results),
            "--png",
            str(picture),
        ]
    )
    assert "mine (published for agentic: 2.72 x)" in capsys.readouterr().out
    written = json.loads(results.read_text())
    ways = [(line["way"], line["bound"]) for line in written["results"]["mine"]]
    assert ways == [
        ("synchronous", None),
        ("synchronous, shared machines", None),
        ("asynchronous, keep", 0),
        ("asynchronous, keep", 1),
        ("asynchronous, wait", 0),
        ("asynchronous, wait", 1),
    ]
    assert written["results"]["mine"][0]["speed_up"] == written["results"]["mine"][2]["speed_up"] == 1
    assert cases_in(results) == cases_in(times), "what is written can be read as times"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_built_in_cases_run() -> None:
    for case in CASES:
        small = replace(case, work=replace(case.work, groups_per_version=2, group_size=2))
        assert len(compare(small, [1], 2, 1)) == 4
