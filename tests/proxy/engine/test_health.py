"""When failures take a replica out and what brings it back, on a clock that the test moves."""

from __future__ import annotations

from dataclasses import dataclass

from proxy.engine.replica import Health, HealthRule

RULE = HealthRule(failures=3, return_probes=3, flap_seconds=60.0)


@dataclass
class Clock:
    now: float = 1000.0

    def __call__(self) -> float:
        return self.now


def test_calls_that_break_in_a_row_are_too_many_and_one_that_works_starts_over() -> None:
    health = Health(RULE)
    assert [health.fail_call() for _ in range(2)] == [False, False]
    health.pass_call()
    assert not health.is_doubtful
    assert [health.fail_call() for _ in range(3)] == [False, False, True]


def test_probes_are_counted_apart_from_calls() -> None:
    """An engine that lists its models and drops every call is out all the same."""
    health = Health(RULE)
    for expected in (False, False, True):
        health.pass_probe()
        assert health.fail_call() is expected
    assert [health.fail_probe() for _ in range(3)] == [False, False, True]


def test_one_that_failed_once_returns_with_its_first_good_probe() -> None:
    health = Health(RULE)
    health.pass_probe()
    health.eject()
    assert not health.has_recovered and health.missing_probes == 1
    health.pass_probe()
    assert health.has_recovered


def test_one_that_fails_again_soon_needs_several_good_probes_in_a_row() -> None:
    clock = Clock()
    health = Health(RULE, clock)
    health.eject()
    health.pass_probe()
    clock.now += 30
    health.eject()
    health.pass_probe()
    health.pass_probe()
    assert health.missing_probes == 1
    health.fail_probe()
    for _ in range(2):
        health.pass_probe()
        assert not health.has_recovered
    health.pass_probe()
    assert health.has_recovered


def test_failures_that_are_far_apart_are_no_flapping() -> None:
    clock = Clock()
    health = Health(RULE, clock)
    for _ in range(5):
        health.eject()
        health.pass_probe()
        assert health.has_recovered
        clock.now += 61
