"""Images in the token view: the placeholders of one are a single span with the image itself, in calls, rows and exported pages."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
from selenium.webdriver.common.keys import Keys

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_images import SEEING, picture, url_of
from tests.support.service.browser import Browser, running_browser
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, RunningService, Session

RED, BLUE = picture("red", (64, 32)), picture("blue", (640, 480))
"""8 placeholders, and 1,200, which are three pages of the view."""


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[RunningService]:
    with (
        ScriptedEngine(SEEING, most_images=2) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as service,
    ):
        yield service


@pytest.fixture(scope="module")
def session(service: RunningService) -> Session:
    """One row of two calls, each of which brings an image."""
    session = service.session()
    asked = [message("What is this?", RED)]
    reply = session.answer(asked)
    session.answer([*asked, reply, message("And this?", BLUE)])
    return session


def message(text: str, data: bytes) -> dict[str, Any]:
    image = {"type": "image_url", "image_url": {"url": url_of(data)}}
    return {"role": "user", "content": [{"type": "text", "text": text}, image]}


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def spans(record: dict[str, Any]) -> list[list[Any]]:
    """The images of a call or row as the token view is told of them."""
    media = enumerate(record["media"], 1)
    return [[number, each["digest"], each["start"], each["start"] + each["length"]] for number, each in media]


@pytest.mark.case(77)
def test_a_page_of_tokens_names_the_images_that_they_stand_for(service: RunningService, session: Session) -> None:
    home = f"/ui/sessions/{session.session_id}"
    (row,) = session.trajectories()[0]
    first, second = session.calls
    red, blue = spans(second)
    assert [red[1], blue[1], blue[3] - blue[2]] == [digest(RED), digest(BLUE), 1200]

    def told(path: str, start: int = 0) -> Any:
        return service.request("GET", f"{home}/{path}/tokens", params={"start": start}).json()["media"]

    assert told(f"calls/{first['call_id']}") == spans(first) == [red]
    assert told(f"calls/{second['call_id']}") == told(f"rows/{row['trajectory_id']}") == [red, blue] == spans(row)
    assert told(f"calls/{second['call_id']}", 400) == [blue], "the page that begins among its placeholders"
    assert told(f"calls/{second['call_id']}", blue[3]) == []


def test_a_downloaded_fork_has_the_images_that_it_replays(service: RunningService, session: Session) -> None:
    """They are its origin's, and were left out: `verbatim view` of a fork showed none, and nothing loads them into the file."""
    fork = service.session(replay={"session_id": session.session_id, "on_divergence": "fail"})
    asked = [message("What is this?", RED)]
    fork.answer([*asked, fork.answer(asked), message("And this?", BLUE)])
    downloads = f"/ui/sessions/{fork.session_id}/download"
    shown = service.request("GET", f"{downloads}/page.html").text.partition("<body")[2].partition("<script")[0]
    assert all(f'src="{url_of(data)}"' in shown for data in (RED, BLUE)) and "sha256:" not in shown
    record = msgpack.unpackb(service.request("GET", f"{downloads}/record.msgpack").content)
    assert record["media"] == sorted(map(digest, (RED, BLUE)))


def test_the_image_of_a_span_is_as_it_was_sent(service: RunningService, session: Session) -> None:
    home = f"/ui/sessions/{session.session_id}/media"
    answer = service.request("GET", f"{home}/{digest(BLUE)}")
    assert (answer.content, answer.headers["content-type"]) == (BLUE, "image/png")
    assert "sandbox" in answer.headers["content-security-policy"]
    for unknown in ("0" * 64, "nothing"):
        assert service.request("GET", f"{home}/{unknown}").status_code == 404


@pytest.mark.case(77)
def test_an_exported_page_has_each_image_once(service: RunningService, session: Session) -> None:
    page = service.request("GET", f"/ui/sessions/{session.session_id}/download/page.html").text
    for data in (RED, BLUE):
        assert page.count(url_of(data)) == 1
        assert re.search(f'src="{re.escape(url_of(data))}" data-media="{digest(data)}"', page)
    stored = re.findall(r'<script[^>]+id="stored-tokens"[^>]*>(.*?)</script>', page, re.DOTALL)
    assert [len(call["media"]) for call in json.loads(stored[0])["calls"]] == [1, 1]


SEEN = "return [...document.querySelectorAll('.stream .image')].map((e) => [e.innerText, e.querySelector('img')?.naturalWidth])"


@pytest.mark.case(77)
def test_the_placeholders_of_an_image_are_one_span_with_the_image(
    service: RunningService, session: Session, tmp_path: Path
) -> None:
    """In the pages of the service and in an exported file; the arrow keys step over it."""
    first, second = session.calls
    (_, _, start, _), blue = spans(second)
    saved, home = tmp_path / "seen.html", f"/ui/sessions/{session.session_id}"
    saved.write_bytes(service.request("GET", f"{home}/download/page.html").content)
    with running_browser() as browser:
        browser.resize(1360, 900)
        browser.open(f"{service.url}{home}")
        browser.focused("[name=token]")
        browser.press(ADMIN, Keys.ENTER)
        browser.wait(lambda: browser.all("#call-2"), "the session")
        # The one that asked for the log-in.
        assert [each for each in browser.complaints() if "401 (Unauthorized)" not in each] == []
        for url in (f"{service.url}{home}", f"file://{saved}"):
            browser.open(url)
            look(browser, "#call-1 .about", start, first)
            look_at_pages(browser, blue)
        assert browser.complaints() == []


def look(browser: Browser, about: str, start: int, call: dict[str, Any]) -> None:
    browser.one(f"{about} > summary").click()
    browser.wait(lambda: browser.run(SEEN) == [["image 1, 8 tokens", 64]], "the image among the tokens")
    shown = browser.run("return document.querySelectorAll('.stream .t').length")
    assert shown == len(call["prompt_ids"]) + len(call["completion_ids"]) - 7
    browser.run("document.querySelector('.stream').focus()")
    browser.press(Keys.HOME, *[Keys.ARROW_RIGHT] * start)
    card = " ".join(browser.text(".card").split())
    assert f"position {start}" in card and "image 1 8 tokens" in card and digest(RED) in card
    browser.press(Keys.ARROW_RIGHT)
    assert browser.text(".card span") == f"position {start + 8}"
    browser.press(Keys.ARROW_LEFT)
    browser.press(Keys.ARROW_LEFT)
    assert browser.text(".card span") == f"position {start - 1}"
    assert browser.barriers() == []
    browser.one(f"{about} > summary").click()


def look_at_pages(browser: Browser, blue: list[Any]) -> None:
    """An image that is larger than a page is one span on each that it is on."""
    browser.run("document.querySelector('#call-1 .tokens').remove()")
    browser.one("#call-2 .about > summary").click()
    # Its last placeholders and the reply.
    browser.wait(lambda: browser.run(SEEN) == [["image 2, 1\u202f200 tokens", 640]], "the end of the image")
    assert blue[3] % 400 and f"Tokens {blue[3] // 400 * 400 + 1:,}".replace(",", "\u202f") in browser.text("[data-where]")
    browser.press("[")
    browser.wait(lambda: len(browser.all(".stream .t")) == 1, "a page of nothing else")
    browser.run("document.querySelector('.stream').focus()")
    browser.press(Keys.ARROW_LEFT)
    browser.wait(lambda: browser.text(".card span") == f"position {blue[2] - 1}", "the token before it")
