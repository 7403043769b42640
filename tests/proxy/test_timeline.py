"""Where a call's time goes, as /metrics tells it: every step of a call once, and waiting apart from the service's own time."""

from __future__ import annotations

import re
import time

import pytest

from proxy.metrics import StepSeconds
from proxy.timeline import COMMIT, ENGINE, OWN, PARTS, SAMPLE, STEPS, STORE, Timeline
from tests.support.engine.scripted_engine import Say, ScriptedEngine
from tests.support.service.running_service import RunningService, Session, wait_until

ENGINE_SECONDS = 0.1
LINE = re.compile(r'verbatim_step_seconds_(count|sum)\{part="(\w+)",step="(\w+)"\} (\S+)')

EVERY_CALL = {(step, "own") for step in ("admit", "parse", "intent", "sample", "commit", "reply")} | {
    ("admit", "harness"),
    ("queue", "own"),
    ("queue", "engine"),
    ("intent", "store"),
    ("sample", "engine"),
    ("commit", "store"),
    ("reply", "harness"),
}
TOKEN_PATH = {("plan", "own"), ("plan", "engine"), ("interpret", "own"), ("interpret", "engine")}


def steps_of(service: RunningService) -> dict[tuple[str, str], tuple[int, float]]:
    """(calls, seconds in all) by step and part."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for kind, part, step, value in LINE.findall(service.request("GET", "/metrics").text):
        found.setdefault((step, part), {})[kind] = float(value)
    return {cell: (int(told["count"]), told["sum"]) for cell, told in found.items()}


def calls_seen(service: RunningService) -> int:
    return steps_of(service).get(("commit", "own"), (0, 0.0))[0]


def ask(session: Session, *, stream: bool) -> None:
    answer = session.ask("What is it?", stream=stream)
    if stream:
        assert list(answer)


@pytest.mark.parametrize("stream", [False, True])
def test_every_call_counts_once_in_each_step_and_waiting_for_the_engine_is_not_the_service_s_own(
    service: RunningService, engine: ScriptedEngine, stream: bool
) -> None:
    wanted = EVERY_CALL | (TOKEN_PATH if service.settings.engine_api == "token" else set())
    before, seen = steps_of(service), calls_seen(service)
    for _ in range(2):
        engine.say(Say("It is 42.", seconds_before=ENGINE_SECONDS))
        ask(service.session(), stream=stream)
    wait_until(lambda: calls_seen(service) == seen + 2, 120, "both calls are counted")
    after = steps_of(service)
    taken = {cell: count - before.get(cell, (0, 0.0))[0] for cell, (count, _) in after.items()}
    assert {cell for cell in taken if taken[cell]} - {("admit", "store")} == wanted
    assert {taken[cell] for cell in wanted} == {2}
    waited = after["sample", "engine"][1] - before.get(("sample", "engine"), (0, 0.0))[1]
    assert waited >= 2 * ENGINE_SECONDS


def test_a_call_that_the_engine_refuses_counts_in_no_step(token_service: RunningService, engine: ScriptedEngine) -> None:
    seen = calls_seen(token_service)
    session = token_service.session()
    assert session.post("/v1/chat/completions", {"messages": 1}).status_code == 400
    ask(session, stream=False)
    wait_until(lambda: calls_seen(token_service) == seen + 1, 120, "the call that was answered is counted, and it alone")


def test_labels_name_steps_and_parts_and_nothing_of_a_session(token_service: RunningService, engine: ScriptedEngine) -> None:
    session = token_service.session()
    ask(session, stream=False)
    page = token_service.request("GET", "/metrics").text
    lines = [line for line in page.splitlines() if line.startswith("verbatim_step_seconds")]
    assert session.session_id not in page
    assert {set(re.findall(r'(\w+)="', line)) <= {"step", "part", "le"} for line in lines} == {True}
    assert "process_cpu_seconds_total" in page


def test_the_parts_of_a_call_add_up_to_the_whole_of_it() -> None:
    before = time.perf_counter()
    timeline = Timeline()
    began = time.perf_counter()
    for step in range(len(STEPS)):
        timeline.begin(step)
        timeline.end_wait(ENGINE, time.perf_counter())
    ended = time.perf_counter()
    timeline.begin(SAMPLE)
    after = time.perf_counter()
    # Sums of differences lose their last digits.
    assert ended - began - 1e-9 <= sum(timeline.seconds) <= after - before + 1e-9
    assert timeline.step == SAMPLE


def test_waits_that_overlap_count_once_and_so_does_one_that_a_step_begins_in() -> None:
    timeline = Timeline()
    first, second = time.perf_counter(), time.perf_counter()
    timeline.end_wait(ENGINE, first)
    timeline.begin(SAMPLE)
    before = time.perf_counter()
    timeline.end_wait(STORE, second)
    after = time.perf_counter()
    assert before - 1e-9 <= timeline.started_at + sum(timeline.seconds) <= after + 1e-9
    assert min(timeline.seconds) == 0
    assert timeline.seconds[SAMPLE * len(PARTS) + OWN] == 0


def test_a_histogram_counts_upwards_and_shows_only_what_was_seen() -> None:
    steps = StepSeconds()
    for seconds in (0.00005, 0.03, 1000.0):
        timeline = Timeline()
        timeline.seconds[COMMIT * len(PARTS) + OWN] = seconds
        steps.took(timeline)
    (family,) = steps.collect()
    assert {(sample.labels["step"], sample.labels["part"]) for sample in family.samples} == {("commit", "own")}
    counted = {sample.labels["le"]: sample.value for sample in family.samples if sample.name.endswith("_bucket")}
    assert (counted["0.0001"], counted["0.02"], counted["0.05"], counted["300.0"], counted["+Inf"]) == (1, 1, 2, 2, 3)
