"""The arithmetic of `benchmarks/needs.py`, against numbers worked out by hand, and the table of docs/deploy.md against its inputs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import capacity, measured_code
from benchmarks.capacity import MARKS, PAGE, costs, fill_page, inputs, page_text, table
from benchmarks.needs import ENDS, Costs, Run, end, need
from benchmarks.store_load import Load, Used, shares
from benchmarks.tables import refusal

RUN = Run(sessions=3_000, turns=10, context_tokens=10_000, sampled_tokens=100, turn_seconds=30.0)
COST = Costs(
    cpu_ms_per_call=1.0,
    cpu_ms_per_thousand_tokens=0.1,
    text_bytes_per_token=4.0,
    redis_cpu_ms_per_session=1.0,
    redis_cpu_ms_per_call=0.1,
    redis_cpu_ms_per_thousand_tokens=0.05,
    redis_bytes_per_session=1_000.0,
    redis_bytes_per_call=500.0,
    redis_bytes_per_token=10.0,
    redis_wire_bytes_per_call=2_000.0,
    redis_wire_bytes_per_token=20.0,
    file_bytes_per_call=1_000.0,
    file_bytes_per_token=10.0,
    busy=0.5,
)
NO_REDIS_CPU = {"redis_cpu_ms_per_session": 0.0, "redis_cpu_ms_per_call": 0.0, "redis_cpu_ms_per_thousand_tokens": 0.0}


def test_a_run_has_as_many_calls_as_its_sessions_make() -> None:
    assert RUN.calls_per_second == 100  # 3,000 sessions, each every 30 s
    assert RUN.sessions_per_second == 10  # of 10 calls each
    # Contexts of 1,000, 2,000 ... 10,000 tokens, each with 100 of its own at the end: 5,500 - 100.
    assert RUN.prompt_tokens == 5_400


def test_what_a_run_needs_is_what_a_hand_works_out() -> None:
    needed = need(RUN, COST)
    assert needed.cpu_cores == pytest.approx(0.154)  # 100 calls of 1 + 0.54 ms
    assert needed.processes == 1
    assert needed.harness_gbit == pytest.approx(0.0176)  # 100 x (5,400 + 100) tokens of 4 bytes
    assert needed.engine_gbit == pytest.approx(0.10144)  # 100 x (21,600 of text + 97,200 of ids + 8,000 of answer) bytes
    assert needed.redis_gib * 2**30 == pytest.approx(636_000_000)  # 6,000 x (1,000 + 10 x 500 + 10,000 x 10)
    assert needed.redis_cores == pytest.approx(0.025)  # 100 x (0.1 + 0.05) ms + 10 x 1 ms
    assert needed.redis_mb == pytest.approx(2.2)  # 100 x (2,000 + 1,000 x 20)
    assert needed.file_mb == pytest.approx(1.1)  # 100 x (1,000 + 1,000 x 10)
    assert needed.trainer_gbit == pytest.approx(0.0072)  # 10 x 10,000 tokens of 9 bytes
    assert needed.share_of_first_primary == pytest.approx(0.02)  # 10 x 1 ms of half a core
    assert needed.share_of_clients == pytest.approx(0.0001232)  # 0.308 processes of 4 connections, of 10,000
    assert (needed.machines, needed.primaries) == (1, 1)


def test_what_is_needed_grows_in_proportion_to_the_sessions() -> None:
    small, large = need(RUN, COST), need(replace(RUN, sessions=300_000), COST)
    for name in ("cpu_cores", "harness_gbit", "engine_gbit", "redis_gib", "redis_cores", "redis_mb", "trainer_gbit"):
        assert getattr(large, name) == pytest.approx(100 * getattr(small, name))
    assert large.processes == 31  # 15.4 cores, half of each


@pytest.mark.parametrize(
    ("changed", "bottleneck"),
    [
        ({"cpu_ms_per_call": 1_000.0}, "proxies' cores"),
        ({"text_bytes_per_token": 40_000.0}, "proxies' network"),
        ({"redis_bytes_per_token": 10_000_000.0}, "Redis memory"),
        ({"redis_cpu_ms_per_call": 1_000.0}, "Redis cores"),
    ],
)
def test_the_first_bottleneck_is_what_the_most_units_are_needed_of(changed: dict[str, Any], bottleneck: str) -> None:
    assert need(RUN, replace(COST, **changed)).first_bottleneck == bottleneck


@pytest.mark.parametrize(
    ("changed", "sessions", "reason"),
    [
        # 3,000 sessions at once are 10 that end per second: 100 ms of the 500 that may be used.
        ({"redis_cpu_ms_per_session": 10.0}, 15_000, "share_of_first_primary"),
        # Each session's 106,000 bytes twice, in 500 primaries of 32 GiB.
        (NO_REDIS_CPU | {"clients_per_process": 0.0}, 500 * 32 * 2**30 // 212_000, "share_of_cluster"),
        # 1.54 ms of half a core: a process for 325 calls a second, which is 9,740 sessions; 2,500 processes of 4 connections.
        (NO_REDIS_CPU | {"most_primaries": 10_000}, 24_350_649, "share_of_clients"),
    ],
)
def test_the_design_ends_where_nothing_can_be_added(changed: dict[str, Any], sessions: int, reason: str) -> None:
    last = end(RUN, replace(COST, **changed))
    assert last.sessions == pytest.approx(sessions, rel=1e-3)
    assert (last.reason, last.remedy) == ENDS[reason]
    assert getattr(need(replace(RUN, sessions=last.sessions), replace(COST, **changed)), reason) == pytest.approx(1.0, rel=1e-3)


def test_every_figure_names_where_it_comes_from_and_a_given_one_wins(tmp_path: Path) -> None:
    sessions = [
        {"tokens": tokens, "own_cpu_ms_last": 2 + tokens / 10_000, "body_bytes_last": 4 * tokens} for tokens in (1000, 9000)
    ]
    (tmp_path / "sessions.json").write_text(json.dumps({"sessions": sessions}))
    with pytest.raises(SystemExit, match=r"store_load\.json missing.*redis_bytes_per_token"):
        inputs(tmp_path)
    share = {"session": 1.0, "call": 2.0, "token": 3.0}
    names = ("cpu_seconds", "memory_bytes", "bytes_in", "bytes_out", "file_bytes")
    (tmp_path / "store_load.json").write_text(json.dumps({"shares": dict.fromkeys(names, share)}))
    found = inputs(tmp_path, {"busy": 0.9, "cpu_ms_per_call": 7.0})
    assert (found["busy"].source, found["cpu_ms_per_call"].source, found["cores"].source) == ("given", "given", "assumed")
    assert found["text_bytes_per_token"].source == "benchmarks/results/sessions.json"
    made = costs(found)
    assert (made.busy, made.cpu_ms_per_call, made.text_bytes_per_token) == (0.9, 7.0, 4.0)
    assert made.cpu_ms_per_thousand_tokens == pytest.approx(0.1)
    # CPU seconds of a token, in milliseconds per thousand; bytes in and out together.
    assert (made.redis_cpu_ms_per_thousand_tokens, made.redis_wire_bytes_per_token) == (3_000_000.0, 6.0)


def test_three_shapes_of_sessions_tell_what_a_session_a_call_and_a_token_cost() -> None:
    def load(sessions: int, calls: int, tokens: int) -> Load:
        spent: dict[str, Any] = dict.fromkeys(("cpu_seconds", "memory_bytes", "bytes_in", "bytes_out"), 0.0)
        return Load(sessions, calls, tokens, Used(**spent, file_bytes=1000 * sessions + 100 * calls + 10 * tokens))

    found = shares([load(200, 200, 20_000), load(20, 400, 40_000), load(20, 400, 400_000)])
    assert found["file_bytes"] == pytest.approx({"session": 1000, "call": 100, "token": 10})
    assert set(found["cpu_seconds"].values()) == {0.0}


def test_the_table_of_the_page_is_what_the_measured_figures_give() -> None:
    """Measured anew: make bench ONLY=sessions,store_load."""
    page = PAGE.read_text()
    assert fill_page(page, page_text()) == page


def test_figures_of_other_code_are_refused_and_the_page_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured_code, "digest", lambda root: "another")
    before = PAGE.read_text()
    why = capacity.write()
    assert why.keys() == {"sessions", "store_load"} and PAGE.read_text() == before
    assert "make bench ONLY=sessions,store_load" in refusal(why)


def test_much_traffic_is_told_in_whole_gigabits() -> None:
    shown = table([need(replace(RUN, sessions=120_000_000), COST)]).splitlines()[-1]
    assert "| 704 Gbit/s | 4,058 Gbit/s |" in shown
    assert "| 288 Gbit/s |" in shown  # to the trainer


def test_the_table_takes_its_place_and_touches_nothing_else() -> None:
    written = fill_page(f"before\n{MARKS[0]}old\n{MARKS[1]}\nafter\n", "new\n")
    assert written == f"before\n{MARKS[0]}\nnew\n\n{MARKS[1]}\nafter\n"
    with pytest.raises(SystemExit, match="has no"):
        fill_page("nothing", "new")
