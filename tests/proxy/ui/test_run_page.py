"""The page of the run: what its charts and figures are made from, without a browser and in one."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator

import pytest
from selenium.webdriver.common.keys import Keys

from proxy.store.run import Point, PolicyOutcome
from proxy.ui.run_charts import add_up, choose_ticks, draw_charts, thin
from proxy.ui.run_pages import MOST_POINTS, measure_trend
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.browser import Browser, running_browser
from tests.support.service.counted_run import BEGAN, LABELS, count, play_rollouts
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService

ROLLOUTS = 480
FEW_NODES = 3000


@pytest.fixture(scope="module", name="service")
def counted_service(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    judge = PolicyOutcome(
        closed_at=BEGAN, status="completed", reward=0.75, solved=False, seconds=1.0, policy="judge", version=3
    )
    count(redis_server.url, [*play_rollouts(ROLLOUTS), judge])
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, engine_api="token") as service:
        yield service


def page(service: RunningService, **query: str) -> str:
    answer = service.request("GET", "/ui/run", params=query)
    assert answer.status_code == 200, answer.text
    return answer.text


def fact(text: str, name: str) -> str:
    """A figure at the head of the page, without markup."""
    shown = re.search(rf"<dt>{name}</dt><dd>(.*?)</dd>", text)
    assert shown, name
    return re.sub(r"<.*?>", "", shown[1])


def points_of(*sums: dict[str, float]) -> list[Point]:
    return [Point(at, each) for at, each in enumerate(sums)]


def rewards(*given: float) -> dict[str, float]:
    sums: dict[str, float] = {"rollouts": len(given), "rewarded": len(given), "reward": sum(given)}
    for reward in given:
        sums[f"r:{reward:.2g}"] = sums.get(f"r:{reward:.2g}", 0) + 1
    return sums


def test_the_page_says_what_the_api_says(service: RunningService) -> None:
    text = page(service)
    whole, judge = service.request("GET", "/run", params={"axis": "all"}).json()["points"][:2]
    assert (whole["rollouts"], judge["policy"], judge["rollouts"]) == (ROLLOUTS, "judge", 1)
    assert fact(text, "rollouts") == str(ROLLOUTS)
    assert fact(text, "mean reward") == f"{whole['reward']:.3g}"
    assert fact(text, "solved") == f"{100 * whole['solved']:.1f} %"
    assert fact(text, "groups with equal rewards") == f"{100 * whole['equal_groups']:.1f} %"
    assert fact(text, "mean reward, first and last tenth").endswith("risen")
    for title in ("Reward", "Share solved", "Tokens sampled per rollout", "Staleness in weight versions"):
        assert f"<b>{title}</b>" in text
    newest = service.request("GET", "/run").json()["points"][ROLLOUTS // 8 - 1]
    assert f"version {newest['start']}: mean {newest['reward']:.3g}" in text


def test_a_label_and_a_policy_are_shown_alone(service: RunningService) -> None:
    of_label = {point["label"]: point for point in service.request("GET", "/run?axis=all&by_label=true").json()["points"]}
    for label in LABELS:
        assert fact(page(service, label=label), "rollouts") == str(of_label[label]["rollouts"])
    judge = page(service, policy="judge")
    assert (fact(judge, "rollouts"), fact(judge, "mean reward")) == ("1", "0.75")
    assert "first and last tenth" not in judge and "Labels" not in judge
    # Over time a point says how much was done.
    assert "<b>Rollouts per hour</b>" in page(service, axis="quarter")
    assert "No closed session is counted" in page(service, axis="quarter", label="unheard of")


def test_the_downloads_are_what_the_api_gives(service: RunningService) -> None:
    answer = service.request("GET", "/ui/run/run.csv", params={"axis": "versions"})
    assert answer.headers["content-disposition"] == 'attachment; filename="run.csv"'
    read = list(csv.DictReader(io.StringIO(answer.text)))
    points = service.request("GET", "/run", params={"axis": "versions", "by_label": True}).json()["points"]
    assert [(each["label"], int(each["start"]), int(each["rollouts"])) for each in read] == [
        (point["label"], point["start"], point["rollouts"]) for point in points
    ]
    found = service.request("GET", "/ui/run/run.json", params={"axis": "versions"}).json()
    assert found["points"] == points
    assert service.request("GET", "/ui/run/run.xml").status_code == 404


def test_neighbours_are_added_up_until_a_chart_is_readable() -> None:
    points = [Point(at, {"rollouts": 1, "reward": at}) for at in range(1000, 1500)]
    drawn, width = thin(points, 1, MOST_POINTS)
    assert width == 7 and len(drawn) == 72 <= MOST_POINTS
    assert drawn[0] == Point(1000, {"rollouts": 7, "reward": sum(range(1000, 1007))})
    assert sum(point.rollouts for point in drawn) == 500
    # Empty intervals make no points, and do not widen the others unevenly.
    sparse, width = thin([Point(0, {"rollouts": 1}), Point(60, {"rollouts": 2}), Point(60 * 1000, {"rollouts": 3})], 60, 80)
    assert [(point.start, point.rollouts) for point in sparse] == [(0, 3), (780 * 76, 3)] and width == 780
    assert thin([], 60, 80) == ([], 60)
    assert add_up([]) == Point(0)


def test_a_trend_is_more_than_chance() -> None:
    rising = points_of(*(rewards(*[1.0] * at, *[0.0] * (20 - at)) for at in range(0, 21, 2)))
    trend = measure_trend(rising)
    assert trend is not None and (trend.word, trend.first, trend.last) == ("risen", 0.05, 0.95)
    falling = measure_trend([Point(-point.start, point.sums) for point in rising][::-1])
    assert falling is not None and falling.word == "fallen"
    noise = measure_trend(points_of(rewards(0.0, 1.0), rewards(1.0, 1.0)))
    assert noise is not None and noise.word == "no clear change"
    assert measure_trend(points_of(rewards(1.0))) is None and measure_trend(points_of({"rollouts": 3}, {"rollouts": 1})) is None


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0, 0.5, 1]),
        (0.0, 0.037, [0, 0.01, 0.02, 0.03, 0.04]),
        (-1.2, 3.0, [-2, 0, 2, 4]),
        (0.0, 8123.0, [0, 5000, 10000]),
    ],
)
def test_ticks_are_round_and_hold_all_values(low: float, high: float, ticks: list[float]) -> None:
    assert choose_ticks(low, high) == ticks
    assert ticks[0] <= low and ticks[-1] >= high


def test_charts_leave_gaps_where_nothing_is_known() -> None:
    """Rewards 1, none, 0, 1: a dash for the first, then a line of two points."""
    charts = draw_charts("version", points_of(rewards(1.0), {"rollouts": 1}, rewards(0.0), rewards(1.0)), 1, 0.0)
    mean = charts[0].lines[0]
    assert re.sub(r"[0-9. ]+", "", mean.path) == "MhML"
    assert mean.last == "1" and charts[0].wide and not any(chart.wide for chart in charts[1:])
    assert "version 1: mean –, median –, p10 –, p90 –, of 1 rollouts" in [spot.text for spot in charts[0].spots]
    assert draw_charts("version", [], 1, 0.0) == []
    # One point, and one that overflowed, are drawn as well.
    for sums in (rewards(0.5), {**rewards(0.5), "reward": float("inf")}):
        assert all(
            "nan" not in chart.lines[0].path and "inf" not in chart.lines[0].path
            for chart in draw_charts("all", points_of(sums), 0, 0.0)
        )


@pytest.fixture(scope="module", name="browser")
def window(service: RunningService) -> Iterator[Browser]:
    with running_browser() as browser:
        browser.open(f"{service.url}/ui/run")
        browser.focused("[name=token]")
        browser.press(ADMIN, Keys.ENTER)
        browser.wait(lambda: browser.driver.title.startswith("Run"), "the page that was asked for")
        browser.complaints()
        yield browser


def test_the_page_keeps_nobody_out_dark_and_light_and_on_a_phone(browser: Browser, service: RunningService) -> None:
    for scheme, (width, height) in (("dark", (1360, 900)), ("light", (390, 844))):
        browser.prefer(scheme)
        browser.resize(width, height, phone=width < 400)
        browser.open(f"{service.url}/ui/run")
        assert browser.run("return document.documentElement.scrollWidth") <= width
        assert browser.barriers() == []
        assert browser.run("return document.querySelectorAll('*').length") < FEW_NODES
    assert browser.complaints() == []


def test_the_page_follows_the_run(browser: Browser, service: RunningService, redis_server: RedisServer) -> None:
    browser.resize(1360, 900)
    early, late = (
        PolicyOutcome(
            closed_at=BEGAN, status="completed", reward=0.5, solved=False, seconds=1.0, policy="late", version=version
        )
        for version in (41, 42)
    )
    count(redis_server.url, [early], "early-")
    with browser.hurrying():
        browser.open(f"{service.url}/ui/run?policy=late")

    def newest() -> str:
        told: str = browser.run("return document.querySelector('.chart rect:last-of-type').textContent")
        return told

    assert newest().startswith("version 41")
    count(redis_server.url, [late], "late-")
    browser.wait(lambda: newest().startswith("version 42"), "the session that was closed meanwhile")
