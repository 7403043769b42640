"""The pages of tasks: each rollout with its reward, its evaluator's words, what it cost and why it ended."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from selenium.webdriver.common.keys import Keys

from proxy.ui.tasks_pages import FEEDBACK_CHARACTERS, Durations, measure_durations, shorten
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.browser import Browser, running_browser
from tests.support.service.redis_server import RedisServer
from tests.support.service.rollout_service import serving_tasks, submit
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.shown_tasks import TASK, shown_task
from tests.support.service.ui_sessions import PROBE


@pytest.fixture(scope="module", name="service")
def service_with_a_task(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    with ScriptedEngine("qwen3") as engine, serving_tasks(redis_server.url, engine.url, engine_api="token") as service:
        shown_task(service, engine)
        yield service


def page(service: RunningService, path: str) -> str:
    answer = service.request("GET", path)
    assert answer.status_code == 200, answer.text
    return answer.text


def cells(text: str) -> list[list[str]]:
    """The table of rollouts, each cell without markup."""
    rows = re.findall(r"<tr>\s*<td.*?</tr>", text[text.index("<caption>Choose two") :], re.S)
    return [
        [" ".join(re.sub(r"<.*?>", " ", cell).split()) for cell in re.findall(r"<td.*?>(.*?)</td>", row, re.S)] for row in rows
    ]


def test_each_rollout_says_how_it_went(service: RunningService) -> None:
    text = page(service, f"/ui/tasks/{TASK}")
    rows = cells(text)
    assert [row[1] for row in rows] == ["0", "1", "2", "3", "4", "5"]
    assert [row[2] for row in rows] == ["completed", "completed", "timeout", "failed", "running", "queued"]
    assert [row[3] for row in rows] == ["1", "0", "0.25", "–", "–", "–"]
    assert rows[0][4] == "4 passed the harness exited with code 0 · logs n1:/logs/0"
    assert rows[1][4].startswith("3 passed, 1 failed AssertionError: IIII != IV in test_four at line 12 … all of the feedback")
    assert "agent_timeout: the agent's budget of 60 s ran out · logs n1:/logs/agent.err" in rows[2][4].replace("&#39;", "'")
    assert rows[3][4].startswith("harness_crashed: pi was ended by signal 9")
    assert [row[8:] for row in rows[:4]] == [["12.0 s", "12.0 s", "60.0 s", "6.0 s"]] * 4
    assert rows[4][8:10] == ["12.0 s", "12.0 s"] and rows[4][11] == rows[5][9] == "–"
    calls = service.request("GET", f"/sessions/{TASK}.1.1/calls").json()["calls"]
    assert rows[1][5:7] == ["1", str(len(calls[0]["completion_ids"]))]


def test_a_task_shows_what_was_asked_and_how_its_rewards_spread(service: RunningService) -> None:
    text = page(service, f"/ui/tasks/{TASK}")
    for shown in (
        "Mend roman.py.",
        "pytest",
        "<dt>label</dt><dd>code</dd>",
        "1 queued, 1 running, 2 completed, 1 failed, 1 timeout",
    ):
        assert shown in text
    # Rewards 1, 0 and 0.25.
    assert "<dt>mean reward</dt><dd>0.4167</dd>" in text and "<dt>spread</dt><dd>0.4249</dd>" in text
    assert f"/ui/compare?left={TASK}.1.1&amp;right={TASK}.0.1" in text
    assert PROBE not in text and "&lt;script&gt;" in text


def test_rollouts_are_ordered_and_filtered(service: RunningService) -> None:
    """Those with nothing in the column come last, in the order of their numbers."""

    def shown(**query: str) -> str:
        address = f"/ui/tasks/{TASK}?{urlencode(query)}"
        return "".join(row[1] for row in cells(page(service, address)) if len(row) > 4)

    assert shown() == "012345"
    assert (shown(sort="reward"), shown(sort="-reward"), shown(sort="-number")) == ("120345", "021345", "543210")
    assert (shown(status="failed"), shown(at_least="0.25"), shown(q="IIII")) == ("3", "02", "1")
    for query in ("sort=colour", "status=sideways", "order=lowest&sort=lowest"):
        assert service.request("GET", f"/ui/tasks/{TASK}?{query}").status_code == 400
    assert "1 cause of failure" in page(service, f"/ui/tasks/{TASK}")


def test_tasks_are_listed_filtered_and_ordered(service: RunningService) -> None:
    submit(service, task_id="later", instruction="Wait.", priority=1, run="lora-8")

    def shown(**query: str) -> list[str]:
        return re.findall(r'data-item href="/ui/tasks/(.*?)"', page(service, f"/ui/tasks?{urlencode(query)}"))

    assert shown() == ["later", TASK]
    assert shown(status="running") == [TASK] and shown(run="lora-8") == ["later"] and shown(q="wait") == ["later"]
    assert shown(sort="-reward") == [TASK, "later"] and shown(at_least="1", label="code") == [TASK]
    assert "No task matches." in page(service, "/ui/tasks?status=cancelled")
    assert f'<a href="/ui/tasks/{TASK}">' in page(service, "/ui")
    missing = service.request("GET", "/ui/tasks/nowhere")
    assert missing.status_code == 404 and "there is no task nowhere" in missing.text


def test_a_service_without_tasks_shows_none(redis_server: RedisServer) -> None:
    with RunningService("http://127.0.0.1:9", redis_server.url, engine_api="chat") as service:
        assert 'href="/ui/tasks"' not in page(service, "/ui")
        assert service.request("GET", "/ui/tasks").status_code == 404


def test_two_rollouts_stand_side_by_side_from_where_they_part(service: RunningService) -> None:
    """By keys alone, and axe finds nothing on the way."""
    with running_browser() as browser:
        browser.open(f"{service.url}/ui/tasks/{TASK}")
        browser.focused("[name=token]")
        browser.press(ADMIN, Keys.ENTER)
        browser.wait(lambda: browser.driver.title.startswith("Task"), "the page that was asked for")
        browser.complaints()
        for scheme, (width, height) in (("dark", (390, 844)), ("light", (1360, 900))):
            browser.prefer(scheme)
            browser.resize(width, height, phone=width < 400)
            for path in ("/ui/tasks", f"/ui/tasks/{TASK}"):
                browser.open(service.url + path)
                assert browser.run("return document.documentElement.scrollWidth") <= width
                assert browser.barriers() == []
        choose(browser, 0)
        choose(browser, 1)
        browser.run("document.querySelector('[data-compare] button').focus()")
        browser.press(Keys.ENTER)
        browser.wait(lambda: browser.text("h1") == "Two sessions side by side", "both of them")
        told = " ".join(browser.text("main").split())
        assert "say the same in 1 messages" in told and "It is IV." in told and "It is IIII." in told
        assert browser.driver.title.startswith(f"{TASK}.0.1")
        assert browser.complaints() == []


def choose(browser: Browser, rollout: int) -> None:
    browser.run(f"document.querySelector('[aria-label=\"Compare rollout {rollout}\"]').focus()")
    browser.press(Keys.SPACE)


def test_durations_are_from_one_status_to_the_next() -> None:
    times = {"queued": 0.0, "preparing": 10.0, "ready": 15.0, "running": 18.0, "evaluating": 30.0, "concluding": 31.0}
    assert measure_durations(times, 99.0) == Durations(13.0, 5.0, 12.0, 1.0)
    assert measure_durations({**times, "completed": 32.0}, 99.0) == Durations(13.0, 5.0, 12.0, 1.0)
    # What lasts is measured up to now; one that was cancelled in its queue waited until then.
    assert measure_durations({"queued": 0.0, "preparing": 10.0}, 12.0) == Durations(10.0, 2.0, None, None)
    assert measure_durations({"queued": 0.0, "cancelled": 4.0}, 99.0) == Durations(4.0, None, None, None)
    assert measure_durations({}, 99.0) == Durations(None, None, None, None)


def test_feedback_begins_with_its_first_lines() -> None:
    assert shorten("4 passed") == "4 passed"
    assert shorten("1\n2\n3\n4\n5") == "1\n2\n3\n4"
    assert shorten("x" * 1000) == "x" * FEEDBACK_CHARACTERS
