"""The page of runs: several laid over each other, and what each lost, without a browser and in one."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from dataclasses import replace

import pytest
from selenium.webdriver.common.keys import Keys

from proxy.store.run import Point
from proxy.ui.run_charts import overlay_charts, thin_all
from reconstruct.reasons import REASONS
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.browser import running_browser
from tests.support.service.counted_run import count, play_rollouts
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, TRAINER, RunningService


@pytest.fixture(scope="module", name="service")
def service_with_two_runs(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    lost = {"no_token_ids": (3, 900), "frozen_model": (1, 50)}
    played = play_rollouts(80)
    count(redis_server.url, [replace(each, run="old") for each in played], "old-")
    bad = [replace(each, run="new", reward=0.0, solved=False, quarantined=lost, incomplete=True) for each in played]
    count(redis_server.url, bad, "new-")
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, engine_api="token") as service:
        yield service


def page(service: RunningService, query: str = "") -> str:
    answer = service.request("GET", f"/ui/run{query}")
    assert answer.status_code == 200, answer.text
    return answer.text


def test_one_run_shows_each_reason_of_its_losses_with_what_it_means(service: RunningService) -> None:
    text = page(service, "?run=new")
    for reason in ("no_token_ids", "frozen_model"):
        assert reason in text and REASONS[reason].sentence in text
    assert "by choice" in text and "<dt>rewards of 0</dt><dd>100.0 %</dd>" in text
    assert "No token is in quarantine." in page(service, "?run=old")


@pytest.mark.parametrize("query", ["?run=gone", "?run=new&run=gone", "?run=%3Cb%3E%26", "?run="])
def test_a_run_that_there_is_not_is_no_other_run(service: RunningService, query: str) -> None:
    """An unknown name showed the newest run."""
    answer = service.request("GET", f"/ui/run{query}")
    assert answer.status_code == 404 and "there is no run" in answer.text and "<b>" not in answer.text


def test_two_runs_are_laid_over_each_other_by_version_and_by_time(service: RunningService) -> None:
    for axis in ("version", "hours"):
        text = page(service, f"?run=new&run=old&axis={axis}")
        assert '<path class="line run0"' in text and '<path class="line run1"' in text
        assert "<b>Share of tokens lost</b>" in text
    assert "line run0" not in page(service, "?run=old")


def test_the_files_hold_the_chosen_runs(service: RunningService) -> None:
    answer = service.request("GET", "/ui/run/run.csv?axis=version&run=old")
    read = list(csv.DictReader(io.StringIO(answer.text)))
    assert {each["run"] for each in read} == {"old"} and sum(int(each["rollouts"]) for each in read) == 80
    both = service.request("GET", "/ui/run/run.json?axis=all&run=old&run=new").json()["points"]
    assert {point["run"] for point in both} == {"old", "new"}


def test_lines_of_runs_do_not_break_where_only_the_other_has_a_point() -> None:
    runs = {
        "a": [Point(start, {"rollouts": 1}) for start in (0, 2, 4)],
        "b": [Point(start, {"rollouts": 1}) for start in (1, 3)],
    }
    (chart,) = [each for each in overlay_charts("version", runs) if each.title == "Rollouts"]
    assert [line.path.count("M") for line in chart.lines] == [1, 1]
    thinned, width = thin_all({"a": [Point(0, {"n": 1}), Point(9, {"n": 1})], "b": [Point(1, {"n": 1})]}, 1, 2)
    assert width == 5 and [point.start for point in thinned["b"]] == [0]


def test_a_run_is_ended_and_hidden_on_its_page_and_no_other_site_can(service: RunningService) -> None:
    for mark, word in (({"ended": "yes"}, "Over since"), ({"hidden": "yes"}, "Show it again")):
        answer = service.request("POST", "/ui/run", data={"run": "old", **mark}, follow_redirects=True)
        assert str(answer.url).endswith("/ui/run?run=old") and word in answer.text
    assert "Over since" in page(service, "?run=old"), "hiding it did not take back its end"
    assert 'value="old"' not in page(service) and "1 hidden run<" in page(service)
    assert "old (over) (hidden)" in page(service, "?hidden=true")
    foreign = service.request("POST", "/ui/run", data={"run": "old", "ended": "no"}, headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403 and "Over since" in page(service, "?run=old")
    assert service.request("POST", "/ui/run", TRAINER, data={"run": "old", "ended": "no"}).status_code == 403
    assert service.request("POST", "/ui/run", data={"run": "<b>", "ended": "no"}).status_code == 404
    for name in ("ended", "hidden"):
        service.request("POST", "/ui/run", data={"run": "old", name: "no"})
    assert "Over since" not in page(service, "?run=old") and 'value="old"' in page(service)


def test_the_page_of_two_runs_keeps_nobody_out(service: RunningService) -> None:
    with running_browser() as browser:
        browser.open(f"{service.url}/ui/run")
        browser.focused("[name=token]")
        browser.press(ADMIN, Keys.ENTER)
        browser.wait(lambda: browser.driver.title.startswith("Run"), "the page that was asked for")
        browser.complaints()
        for scheme, (width, height), query in (("light", (1360, 900), "?run=new&run=old"), ("dark", (390, 844), "?run=new")):
            browser.prefer(scheme)
            browser.resize(width, height, phone=width < 400)
            browser.open(f"{service.url}/ui/run{query}")
            assert browser.run("return document.documentElement.scrollWidth") <= width
            assert browser.barriers() == []
        assert browser.complaints() == []
