"""What a call costs in instructions, memory and traffic has not grown over the recorded baseline; and the check can fail.

Counted in processes of their own (`benchmarks.counts`), since tracing and the memory of other tests would be counted, too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from benchmarks.counting import Instructions
from benchmarks.counts import GROWTH, PYTHON, Figures, grown, libraries, recorded_baseline
from benchmarks.processes import ROOT

# Counted, not timed: every instruction of a process is looked at, which takes what it takes.
pytestmark = pytest.mark.timeout(900)
BASELINES = recorded_baseline()
FIRST = "token path, first call"
STREAMED = "token path, streamed, call 2"
MOST_FILES = 43
"""Of the service and of `reconstruct`, that a streamed call may enter: whoever reads its path reads these. One of them only where a
connection to an engine is opened."""

needs_baseline = pytest.mark.skipif(
    PYTHON not in BASELINES and os.environ.get("CI") != "true",
    reason=f"no counts are recorded for Python {PYTHON}: make cost-baseline",
)

SLOWER = """
import sys
import proxy.call.run as run
from benchmarks import counts

recording = run.build_records

def records_with_more_work(*args, **more):
    for _ in range({times}):
        sum([1, 2])
    return recording(*args, **more)

sys.argv[1:] = ["--json", "--only", {case!r}]
run.build_records = records_with_more_work
records_with_more_work.__code__ = records_with_more_work.__code__.replace(co_filename=run.__file__)
counts.main()
"""


def counted(*argv: str) -> Figures:
    ended = subprocess.run(
        [sys.executable, *argv],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    figures: Figures = json.loads(ended.stdout)
    return figures


@pytest.fixture(scope="module")
def now() -> Figures:
    return counted("-m", "benchmarks.counts", "--json")


@pytest.mark.case(65)
@needs_baseline
def test_no_call_costs_more_than_its_baseline(now: Figures) -> None:
    baseline = BASELINES[PYTHON]
    assert now.keys() == baseline["figures"].keys()
    same_libraries = baseline["libraries"] == libraries()
    complaints = grown(baseline["figures"], now, same_libraries=same_libraries)
    if complaints:
        # A busy machine can add to every round; what the code itself costs is there the next time, too.
        again = cheaper(now, counted("-m", "benchmarks.counts", "--json"))
        complaints = grown(baseline["figures"], again, same_libraries=same_libraries)
    assert not complaints, "\n".join([*complaints, "is it worth it? then: make cost-baseline"])


@pytest.mark.case(65)
def test_a_streamed_call_enters_few_files(now: Figures) -> None:
    """On the path with the most steps: its second turn renders, proves, samples and parses over three routes."""
    assert now[STREAMED]["files"] <= MOST_FILES, "fold what is small into its one caller: python -m benchmarks.counts --files"


def cheaper(one: Figures, other: Figures) -> Figures:
    return {case: {what: min(count, other[case][what]) for what, count in counts.items()} for case, counts in one.items()}


def test_a_fifth_more_work_in_a_call_is_found(now: Figures) -> None:
    """A turn of the loop takes ten instructions."""
    more = counted("-c", SLOWER.format(times=now[FIRST]["own_instructions"] // 5 // 10, case=FIRST))
    (complaint,) = grown(now, more, same_libraries=True)
    assert complaint.startswith(f"{FIRST}: own_instructions grew by")


def test_counts_may_grow_by_their_tolerance_and_no_more() -> None:
    before = {"a": {"own_instructions": 1000, "library_instructions": 1000, "redis_reads": 3}}
    allowed = {"a": {"own_instructions": int(1000 * (1 + GROWTH)), "library_instructions": 2000, "redis_reads": 3}}
    assert grown(before, allowed, same_libraries=False) == []
    assert grown(before, allowed, same_libraries=True) == ["a: library_instructions grew by 100%, from 1,000 to 2,000"]
    assert grown(before, {"a": {"redis_reads": 4}}, same_libraries=True) == ["a: redis_reads grew by 33%, from 3 to 4"]
    assert grown(before, {"a": {"engine_calls": 1}, "b": {"redis_reads": 1}}, same_libraries=True) == [
        "a: engine_calls has no baseline",
        "b: redis_reads has no baseline",
    ]


def test_the_same_work_takes_the_same_instructions() -> None:
    def work() -> int:
        return sum(number * number for number in range(100))

    counts = []
    for _ in range(2):
        instructions = Instructions()
        with instructions.counted():
            work()
        counts.append((instructions.own, instructions.library))
    assert counts[0] == counts[1]
    assert counts[0][0] == 0 and counts[0][1] > 500
