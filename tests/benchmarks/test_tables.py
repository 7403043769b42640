"""The tables of the Markdown files are those of the committed results, and what they compare is computed as it says."""

import json
import math
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from benchmarks import delivery, first_byte
from benchmarks.calls import tables
from benchmarks.contenders import Proxy, wait_for_answer
from benchmarks.first_byte import CHAT, Way, compared
from benchmarks.load import Body, CallsFailed, Loaded
from benchmarks.processes import ROOT, free_port, started
from benchmarks.replies import LARGE, SMALL, answers
from benchmarks.results import RESULTS, measure, spread
from benchmarks.tables import APART, FILES, MINUTES, module, render, written
from benchmarks.trials import MOST_SECONDS, SLOWEST_SECONDS, Trial, figures, measured, run_seconds


def loaded(calls: int, seconds: float = 2.0, p50_ms: float = 3.0) -> Loaded:
    return Loaded(calls, seconds, p50_ms, 2 * p50_ms, 3 * p50_ms, bytes=1, refused=0, broken=0, timeouts=0)


def test_every_table_is_the_one_of_the_committed_results() -> None:
    for path in FILES:
        text = path.read_text()
        assert written(text) == text, f"{path.name} is not what the results say: python -m benchmarks.tables --write"


def test_every_benchmark_is_in_the_readme_and_has_tables_of_what_was_measured() -> None:
    text, shown = (ROOT / "benchmarks" / "README.md").read_text(), render()
    for name, minutes in MINUTES.items():
        assert f"| {name} | {minutes} |" in text
        assert callable(module(name).run)
        assert f"`benchmarks/results/{name}.json`" in shown.partition(f"## {name}\n")[2].partition("\n## ")[0]
    assert sum(minutes for name, minutes in MINUTES.items() if name not in APART) <= 15


def test_the_table_of_the_gpu_tells_the_committed_results() -> None:
    """It is written by hand: another machine than that of the other tables."""
    told = (ROOT / "benchmarks" / "README.md").read_text().partition("**On a GPU**")[2].partition("<sub>")[0]
    lines = map(json.loads, (RESULTS / "trees.jsonl").read_text().splitlines())
    measured = {line["agent"]: line for line in lines if line["dtype"] == "bfloat16" and "trees" in line}
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in told.splitlines() if row.startswith("| ")][2:]
    assert [row[0] for row in rows] == sorted(measured)
    for agent, *cells in rows:
        tokens, merged, trees = (measured[agent][name] for name in ("tokens", "merged", "trees"))
        assert cells[:2] == [f"{tokens['merged']:,}", f"{tokens['trees']:,}"]
        assert [float(cell) for cell in cells[2:4]] == [float(f"{way['seconds']:.3g}") for way in (merged, trees)]
        assert cells[4] == f"{merged['seconds'] / trees['seconds']:.1f}x"
        assert cells[5:] == [f"{way['memory_gb']:.1f}" for way in (merged, trees)]


def test_the_readme_tells_the_ratios_of_the_committed_results() -> None:
    rows = tables(json.loads((RESULTS / "calls.json").read_text()))[0].rows
    told = " ".join((ROOT / "README.md").read_text().partition("## Cost")[2].partition("\n## ")[0].split())
    for beside, scale, unit in (
        ("rllm-model-gateway, SQLite", 1, " times the calls per second"),
        ("LiteLLM proxy", 1, " times those of the LiteLLM proxy"),
        ("nginx passing through unread", 100, " % of what nginx"),
        ("added latency, p50", 1, " ms"),
    ):
        found = [float(re.sub(r"[^\d.]", "", row[3])) * scale for row in rows if row[1] == beside]
        assert f"{min(found):.2g} to {max(found):.2g}{unit}" in told, beside


def test_a_table_appears_with_its_results_and_goes_with_them(tmp_path: Path) -> None:
    text = "before\n<!-- table: delivery -->\n\nNot measured yet.\n\n<!-- end of table -->\nafter"
    lease = {"groups": 20, "leases_per_second": 500.0, "cpu_ms_per_lease": 1.5}
    measure(
        "delivery",
        lambda _: {"group_size": 8, "leases": lease, "batches": []},
        delivery.tables,
        None,
        quick=False,
        out=tmp_path,
    )
    shown = written(text, tmp_path)
    assert "| 20 groups of 8 small rows | 500 | 1.5 |" in shown
    assert written(shown, tmp_path) == shown
    (tmp_path / "delivery.json").unlink()
    assert written(shown, tmp_path) == text


def test_a_section_that_is_broken_off_keeps_what_it_had_found(tmp_path: Path) -> None:
    def run(_: bool) -> Iterator[dict[str, Any]]:
        yield {"cells": [1]}
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        measure("part", run, lambda _: (), None, quick=True, out=tmp_path)
    assert json.loads((tmp_path / "part.json").read_text())["cells"] == [1]


def test_a_peer_that_fails_leaves_its_cell_empty_and_the_service_that_fails_ends_the_section() -> None:
    def figures_of(proxy: Proxy) -> dict[str, Any]:
        warmed = {"it": CallsFailed("answered 500")}
        return measured({"it": proxy}, {"it": Body("", "")}, 16, 1.0, 2, warmed, lambda: None)

    assert figures_of(Proxy("LiteLLM", "", ())) == {"it": {"calls": 0, "failed": "answered 500"}}
    with pytest.raises(SystemExit, match="answered 500"):
        figures_of(Proxy("verbatim, chat path", "", ()))


def test_a_peer_that_ends_instead_of_listening_is_told_with_its_last_words(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", "raise SystemExit('no master key is set')"]
    with (
        started(argv, log=tmp_path / "log") as process,
        pytest.raises(SystemExit, match=r"(?s)exit code 1 .*no master key is set"),
    ):
        wait_for_answer("LiteLLM", process, free_port(), "/health", tmp_path / "log")


def test_a_run_is_long_enough_for_three_calls_over_each_connection_or_for_one_of_a_slow_peer() -> None:
    assert run_seconds(2.0, 16, 0.01) == 2
    assert run_seconds(2.0, 16, 0.3) == pytest.approx(14.4)
    assert run_seconds(2.0, 64, 0.1) == MOST_SECONDS
    assert run_seconds(2.0, 16, 1.0) == pytest.approx(20)
    assert run_seconds(2.0, 256, 1.0) == SLOWEST_SECONDS


def test_figures_are_per_call_and_leave_out_runs_without_an_answer() -> None:
    trials = [Trial(loaded(100), 0.5, 0.1, 80.0), Trial(loaded(300), 0.6, 0.1, 90.0), Trial(loaded(0), 0.4, 0.1, 70.0)]
    found = figures(trials)
    assert found["calls"] == 400
    assert found["calls_per_second"] == spread([50, 150]) == {"median": 100, "least": 50, "most": 150}
    assert found["cpu_seconds_per_1000_calls"] == {"median": 3.5, "least": 2, "most": 5}
    assert found["cpu_seconds_by_round"] == [5, 2]
    assert found["resident_mib"] == 90
    assert "p50_ms" not in figures(trials[2:])


def test_a_call_that_costs_more_from_round_to_round_is_seen_in_the_table() -> None:
    """A median over the rounds hid that the service had come to read every session from the store again."""
    setting = {"contender": "verbatim", "size": "large", "streamed": False, "connections": 16}
    trials = [Trial(loaded(100), seconds, None, 80.0) for seconds in (0.2, 0.4, 0.5)]
    table = tables({"cells": [setting | figures(trials)]})[1]
    assert dict(zip(table.columns, table.rows[0], strict=True))["by round"] == "2, 4, 5"


def test_targets_are_ratios_of_medians_and_of_cpu() -> None:
    def cell(contender: str, connections: int, calls: int, cpu_seconds: float | None, p50_ms: float) -> dict[str, object]:
        setting = {"contender": contender, "size": "small", "streamed": False, "connections": connections}
        return setting | figures([Trial(loaded(calls, p50_ms=p50_ms), cpu_seconds, None, None)])

    measured = [
        cell("engine", 1, 4000, None, 0.25),
        cell("verbatim", 1, 1000, 1.0, 1.0),
        cell("verbatim", 16, 1000, 1.0, 16.0),
        cell("rllm-sqlite", 16, 100, 2.0, 160.0),
    ]
    rows = tables({"cells": measured})[0].rows
    name = "**Verbatim**, chat path, Redis, small"
    assert (name, "rllm-model-gateway, SQLite", "≥ 12x", "10x", "20x", "10x", "10x") in rows
    assert (name, "added latency, p50", "≤ 1 ms", "0.75 ms", "1 ms", "0.75 ms", "0.75 ms") in rows
    assert (name, "LiteLLM proxy", "≥ 40x", "-", "-", "-", "-") in rows


def test_what_a_way_adds_is_told_by_the_medians_and_by_the_rounds_that_both_have() -> None:
    taken = {CHAT: {0: 1.0, 1: 10.0, 2: 100.0}, "ours": {0: 3.0, 2: 101.0, 3: 5.0}}
    found = compared(Way("ours", "", "", "", base=CHAT), taken)
    assert (found.median_ms, found.added_ms, found.to_chat_ms, found.added_by_round_ms) == (5.0, -5.0, -5.0, 1.5)
    assert found.by_round_within_ms == (1.0, 2.0)
    (grid, _) = first_byte.tables({"ways": [{"name": "ours", "byte": asdict(found), "text": asdict(found)}]})
    assert grid.rows == (("ours", "5.0", "101.0", "-5.0", "+1.5 (+1.0 to +2.0)", "-5.0"),)


@pytest.mark.parametrize("rounds", [7, 30, 120])
def test_the_interval_of_a_median_has_it_nineteen_times_of_twenty(rounds: int) -> None:
    dice = random.Random(rounds)
    drawn = [sorted(dice.expovariate(1.0) for _ in range(rounds)) for _ in range(4000)]
    inside = [least <= math.log(2) <= most for least, most in map(first_byte.median_within, drawn)]
    assert sum(inside) / len(inside) == pytest.approx(0.95, abs=0.035)


def test_the_static_engine_answers_with_as_many_ids_as_the_size_says() -> None:
    whole = json.loads(answers(LARGE, stream=False)["chat.json"])
    assert len(whole["prompt_token_ids"]) == LARGE.prompt
    assert len(whole["choices"][0]["token_ids"]) == len(whole["choices"][0]["logprobs"]["content"]) == LARGE.sampled
    events = answers(SMALL, stream=True)["generate.sse"].split(b"\n\n")
    ids = [json.loads(event[6:])["choices"][0]["token_ids"] for event in events if b"token_ids" in event]
    assert sum(map(len, ids)) == SMALL.sampled
    assert events[-2] == b"data: [DONE]"
