"""The pages of /ui in a real Chromium: what a person sees, does with keys alone, and what a page costs the browser."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.browser import Browser, running_browser
from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.ui_sessions import (
    IMAGE_WIDTH,
    LARGE_CALLS,
    LONG_TOKENS,
    PROBE,
    agent_session,
    group_of_four,
    hostile_session,
    imported,
    large_session,
    long_session,
    picture_session,
    shown_engine,
    shown_service,
)
from tests.support.sessions.calls import Talk
from tests.support.sessions.stored_scores import scored

__all__ = ["shown_engine", "shown_service"]
SHOWN = (group_of_four, agent_session, picture_session, hostile_session, large_session, long_session)
DESKTOP, PHONE = (1360, 900), (390, 844)
FEW_NODES = 3000
"""More than any page has, and a fortieth of the tokens of the long call."""


@pytest.fixture(scope="module")
def window(service: RunningService) -> Iterator[Browser]:
    """Logged in, by keys alone."""
    with running_browser() as browser:
        browser.resize(*DESKTOP)
        browser.open(f"{service.url}/ui/groups")
        assert browser.text("h1") == "Log in"
        assert browser.barriers() == []
        browser.focused("[name=token]")
        browser.press("not the token", Keys.ENTER)
        browser.wait(lambda: browser.all(".refused"), "a refusal")
        browser.focused("[name=token]")
        browser.press(ADMIN, Keys.ENTER)
        browser.wait(lambda: browser.driver.title.startswith("Groups"), "the page that was asked for")
        # Those that a refused log-in leaves.
        assert [each for each in browser.complaints() if "401 (Unauthorized)" not in each] == []
        yield browser


@pytest.fixture
def browser(window: Browser) -> Iterator[Browser]:
    """The window as a person finds it; nothing may be in its console at the end."""
    window.resize(*DESKTOP)
    window.prefer("light")
    yield window
    assert window.complaints() == []


@pytest.fixture
def hurrying(browser: Browser) -> Iterator[None]:
    with browser.hurrying():
        yield


def call_of(service: RunningService, session_id: str, number: int) -> str:
    call_id: str = service.request("GET", f"/sessions/{session_id}/calls").json()["calls"][number - 1]["call_id"]
    return f"/ui/sessions/{session_id}?at={call_id}#call-{number}"


def opened(browser: Browser, service: RunningService, path: str) -> None:
    browser.open(service.url + path)


def opened_tokens(browser: Browser, service: RunningService, session_id: str, number: int) -> None:
    """The tokens of a call, one click below its reply."""
    browser.open("about:blank")
    browser.open(service.url + call_of(service, session_id, number))
    browser.one(f"#call-{number} .about > summary").click()
    browser.wait(lambda: browser.all(".stream .t"), "tokens")


def told(browser: Browser, selector: str) -> str:
    """What stands there, with plain blanks."""
    return " ".join(browser.text(selector).split())


def blanks(number: int) -> str:
    return f"{number:,}".replace(",", " ")


def nodes(browser: Browser) -> int:
    count: int = browser.run("return document.querySelectorAll('*').length")
    return count


PAGES = {
    "sessions": "/ui",
    "ordered": "/ui?sort=-reward&loss=truncated&at_least=0",
    "found": "/ui?q=smaller%20sign&in=texts",
    "concepts": "/ui/concepts",
    "groups": "/ui/groups?status=waiting",
    "group": "/ui/groups/bug%207%2Fa%26b",
    "session": "/ui/sessions/rich",
    "agent": "/ui/sessions/agent",
    "picture": "/ui/sessions/picture",
    "hostile": "/ui/sessions/hostile",
    "long": "/ui/sessions/long",
    "search": "/ui/sessions/agent?q=work",
    "compare": "/ui/compare?left=rich&right=poor",
}
LOOKS = ((("dark", DESKTOP), ("light", PHONE)), (("light", DESKTOP), ("dark", PHONE)))
"""One or the other, in turn: each page in both schemes and in both widths."""


CUT_LISTS = """return [...document.querySelectorAll("[data-live=list]")].filter((e) => e.scrollWidth > e.clientWidth)
.map((e) => e.textContent)"""
"""Lists with columns that are seen only after scrolling sideways."""


def unfold(browser: Browser) -> None:
    """Open everything that is folded, forks first, and wait until it is loaded."""
    unfold_all = "for (const part of document.querySelectorAll('main details')) part.open = true"
    done = "return [...document.querySelectorAll(arguments[0])].every((e) => e.textContent && !e.textContent.startsWith('Loading'))"
    browser.run(unfold_all)
    browser.wait(lambda: browser.run(done, ".fork > div"), "the forks")
    browser.run(unfold_all)
    browser.wait(lambda: browser.run(done, "[data-about], [data-where]"), "the tokens")


@pytest.mark.parametrize("name", PAGES)
def test_axe_finds_nothing_serious_dark_and_light_wide_and_on_a_phone(
    browser: Browser, service: RunningService, name: str
) -> None:
    backgrounds = set()
    for scheme, size in LOOKS[[*PAGES].index(name) % 2]:
        browser.prefer(scheme)
        browser.resize(*size, phone=size == PHONE)
        opened(browser, service, PAGES[name])
        unfold(browser)
        assert browser.run("return document.documentElement.scrollWidth") <= size[0]
        assert browser.run(CUT_LISTS) == []
        assert browser.barriers() == []
        backgrounds.add(browser.run("return getComputedStyle(document.body).backgroundColor"))
    assert len(backgrounds) == 2


def test_the_switch_wins_over_the_system_and_is_remembered(browser: Browser, service: RunningService) -> None:
    def background() -> str:
        colour: str = browser.run("return getComputedStyle(document.body).backgroundColor")
        return colour

    opened(browser, service, "/ui")
    light = background()
    browser.press("t")
    dark = background()
    assert dark != light
    opened(browser, service, "/ui/groups")
    assert background() == dark
    browser.one("[data-theme-switch]").click()
    assert background() == light
    browser.run("localStorage.clear()")


def test_everything_is_reached_by_keys_alone(browser: Browser, service: RunningService) -> None:
    opened(browser, service, "/ui")
    browser.press("/", "bug-7", Keys.ENTER)
    browser.wait(lambda: "q=bug-7" in browser.driver.current_url, "what was searched for")
    assert browser.texts("[data-item]") == ["fair", "poor", "rich"]
    browser.press("j", "j", "j", Keys.ENTER)
    browser.wait(lambda: browser.driver.title.startswith("Session rich"), "the third of them")
    browser.run("document.querySelector('[data-tree] a').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ENTER)
    browser.wait(lambda: browser.driver.current_url.endswith("#call-2"), "the call right of the first one")
    browser.press("j", "j")
    assert browser.run("return document.activeElement.textContent") == "call 2"
    browser.press(Keys.TAB)
    browser.press(Keys.TAB, Keys.ENTER)
    browser.wait(lambda: browser.all("#call-2 .stream .t"), "its tokens")
    browser.press("?")
    assert browser.one("#keys").is_displayed()
    browser.press(Keys.ESCAPE)
    browser.press("u")
    browser.wait(lambda: browser.driver.title.startswith("Group"), "up to the group")


def test_why_a_reward_is_zero_is_seen_in_the_list_and_whole_after_one_click(browser: Browser, service: RunningService) -> None:
    opened(browser, service, "/ui?q=roman")
    assert "AssertionError: assert 'IIII' == 'IV'" in browser.text("[data-live=list]")
    browser.one("[data-item]").click()
    browser.wait(lambda: browser.driver.title.startswith("Session agent"), "the session")
    assert browser.text(".verdict .reward") == "0"
    assert "+ IIII" in browser.text(".verdict")
    top = browser.run("return document.querySelector('.verdict pre').getBoundingClientRect().bottom")
    assert top < DESKTOP[1]


def test_a_run_is_read_with_its_sub_agent_where_it_was_started(browser: Browser, service: RunningService) -> None:
    opened(browser, service, "/ui/sessions/agent")
    assert not browser.one(".system pre").is_displayed() and not browser.one(".reasoning pre").is_displayed()
    browser.one("#fork-3 > summary").click()
    browser.wait(lambda: browser.all("#call-4"), "the sub-agent's turns")
    shown = told(browser, ".turns")
    order = [
        "output of bash",
        "calls task",
        "Sub-agent after call 2",
        "docs/rules.md",
        "output of task",
        "Compaction after call 5",
    ]
    assert sorted(order, key=shown.index) == order
    assert "quarantined: role_compaction" in shown
    browser.one("#call-4 .about > summary").click()
    browser.wait(lambda: browser.all("#call-4 .stream .t"), "tokens in a fork")


def test_what_was_searched_for_is_marked_even_where_it_was_folded(browser: Browser, service: RunningService) -> None:
    opened(browser, service, "/ui/sessions/agent")
    browser.press("/", "unknown to me", Keys.ENTER)
    browser.wait(lambda: "1 call found" in browser.text(".conversation"), "the call")
    assert [mark.text for mark in browser.all("mark") if mark.is_displayed()] == ["unknown to me"]
    browser.one("[data-item]").click()
    browser.wait(lambda: browser.all("#call-2"), "the call among the others")


IMAGE_SEEN = "return document.querySelector('.block img').naturalWidth"


def test_an_image_is_seen(browser: Browser, service: RunningService, tmp_path: Path) -> None:
    saved = tmp_path / "picture.html"
    saved.write_bytes(service.request("GET", "/ui/sessions/picture/download/page.html").content)
    for url in (f"{service.url}/ui/sessions/picture", f"file://{saved}"):
        browser.open(url)
        browser.wait(lambda: browser.run(IMAGE_SEEN) == IMAGE_WIDTH, "the image")


def test_a_token_says_what_is_known_of_it(browser: Browser, service: RunningService) -> None:
    call = service.request("GET", "/sessions/rich/calls").json()["calls"][1]
    opened_tokens(browser, service, "rich", 2)
    first = len(call["prompt_ids"])

    def card() -> str:
        return told(browser, "[data-card]")

    browser.wait(lambda: f"position {first}" in card(), "the first sampled token")
    browser.run("document.querySelector('[data-stream]').focus()")
    browser.press(Keys.ARROW_RIGHT)
    for said in (f"position {first + 1}", f"id {call['completion_ids'][1]}", f"logprob {call['logprobs'][1]:.4f}", "weights 3"):
        assert said in card()
    browser.press(Keys.HOME)
    assert "position 0" in card() and "prompt" in card() and "logprob" not in card()
    browser.press(Keys.END, Keys.ARROW_UP, Keys.ARROW_DOWN)
    assert "mask 1" in card()
    browser.press("s")
    browser.wait(lambda: "There is none" in card() or "logprob" in card(), "a surprise or none")


def test_masks_and_weight_versions_have_colours_of_their_own(browser: Browser, service: RunningService) -> None:
    """The third call was sampled under other weights than the second; the session's rows train each of them once."""
    seen = {}
    for number in (2, 3):
        opened_tokens(browser, service, "rich", number)
        browser.press("c", "c")
        assert browser.one("[data-stream]").get_attribute("data-colour") == "version"
        last = browser.all(".stream .t")[-1]
        seen[number] = last.value_of_css_property("background-color")
        assert f"weights {number + 1}" in browser.text("[data-legend]")
    assert seen[2] != seen[3]
    assert not browser.one("[data-mode][value=score]").is_displayed(), "nobody has scored it"
    browser.press("c")
    assert browser.one("[data-stream]").get_attribute("data-colour") == "logprob"
    browser.one("[data-mode][value=mask]").click()
    kinds = {token.get_attribute("class").split()[1] for token in browser.all(".stream .t")}
    assert kinds == {"k0", "k1"}


def test_the_scores_of_the_scorer_that_is_chosen_have_colours(browser: Browser, service: RunningService) -> None:
    """The sampled token k has the logprob 0 by the one, and -9 k by the other."""
    session = service.session()
    session.ask("q", max_tokens=4)
    for scorer, nats in (("distant", 9.0), ("near", 0.0)):
        scored(service, session.session_id, scorer, top_k=0, nats=nats)
    browser.open(f"{service.url}/ui/sessions/{session.session_id}")
    browser.one("[data-tokens*='rows/'] > summary").click()
    browser.wait(lambda: browser.all(".stream .t"), "tokens")
    browser.one("[data-mode][value=score]").click()

    def far() -> int:
        return len(browser.all(".stream .t.k1.d3"))

    assert far() == 3
    browser.one("[data-scorer]").send_keys("near")
    assert far() == 0 and len(browser.all(".stream .t.k1.d0, .stream .t.k1.d1")) == 4


def test_a_call_of_128k_tokens_costs_no_more_than_a_short_one(browser: Browser, service: RunningService) -> None:
    opened_tokens(browser, service, "long", 1)
    assert f"of {blanks(LONG_TOKENS)}" in told(browser, "[data-where]")
    assert nodes(browser) < FEW_NODES
    sampled = LONG_TOKENS - 1000
    assert f"position {blanks(sampled)}" in told(browser, "[data-card]")
    browser.press("s")
    browser.wait(lambda: browser.all(".stream .here.b4, .stream .here.b5"), "a surprising token")
    browser.run("const s = document.querySelector('[data-slider]'); s.value = 0; s.dispatchEvent(new Event('change'))")
    browser.wait(lambda: "Tokens 1 to" in browser.text("[data-where]"), "the first page")
    browser.press("]")
    browser.wait(lambda: "Tokens 401 to" in browser.text("[data-where]"), "the second page")
    browser.press("m")
    browser.wait(lambda: f"position {blanks(sampled)}" in told(browser, "[data-card]"), "where sampling began")
    assert nodes(browser) < FEW_NODES
    assert "of 660" in browser.text(".message.user")


def test_a_session_of_a_thousand_calls_opens_and_every_call_is_found(browser: Browser, service: RunningService) -> None:
    opened(browser, service, "/ui/sessions/large")
    assert nodes(browser) < FEW_NODES
    counted = [label.text for label in browser.all("[data-tree] text")]
    assert sum(int(label.split()[0]) if "calls" in label else 1 for label in counted) == LARGE_CALLS
    browser.resize(*PHONE, phone=True)
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    shown = len(browser.all(".turn"))
    browser.run("document.querySelector('.more').scrollIntoView()")
    browser.wait(lambda: len(browser.all(".turn")) > shown, "the turns that follow")
    ids = browser.run("return [...document.querySelectorAll('.turn')].map((turn) => turn.id)")
    assert len(ids) == len(set(ids))
    browser.press("/", f"call {LARGE_CALLS}", Keys.ENTER)
    browser.wait(lambda: len(browser.all(".turn")) == 1, "the last one")
    browser.press("j", Keys.ENTER)
    browser.wait(lambda: f"at=c{LARGE_CALLS}" in browser.driver.current_url, "its place in the conversation")
    assert "Branch after call 970." in browser.text(".conversation")
    browser.one(f"#call-{LARGE_CALLS} .about > summary").click()
    browser.wait(lambda: browser.all(".stream .t"), "tokens")
    assert nodes(browser) < FEW_NODES


def test_what_would_be_script_stays_text(browser: Browser, service: RunningService) -> None:
    for path in ("/ui", "/ui/groups", "/ui/sessions/hostile", "/ui/sessions/hostile?q=img"):
        opened(browser, service, path)
        unfold(browser)
        assert "owned" not in browser.driver.title
        assert browser.all("img") == [] and browser.all("main script") == []
        assert PROBE[:20] in browser.text("main")
    opened_tokens(browser, service, "hostile", 1)
    assert 'onerror="document.title' in browser.text(".stream")
    assert "owned" not in browser.driver.title


SCROLL = "scrollTo(0, document.body.scrollHeight)"
STARTS = """return performance.getEntriesByType("resource").map((entry) => new URL(entry.name))
.filter((url) => url.pathname.endsWith("/turns")).map((url) => Number(url.searchParams.get("start")))"""
"""Of the turns that were asked for, in this order."""


@pytest.mark.usefixtures("hurrying")
def test_lists_keep_themselves_up_to_date(
    browser: Browser, service: RunningService, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page has one turn here; the others come by scrolling, each of them once."""
    monkeypatch.setattr("proxy.ui.pages.TURNS_ON_A_PAGE", 1)
    opened(browser, service, "/ui")
    session = service.session(session_id="arrived-later")
    browser.wait(lambda: "arrived-later" in browser.text("[data-live=list]"), "the new session")
    opened(browser, service, "/ui/sessions/arrived-later")
    engine.say(engine.family.speak("Here I am."))
    session.ask("q")
    browser.wait(lambda: "Here I am." in browser.text(".turns"), "its call")
    assert "No call is recorded" not in browser.text(".conversation")
    browser.one("#call-1 .about > summary").click()
    engine.say(engine.family.speak("Here again."))
    session.ask("another")
    browser.wait(lambda: browser.run(SCROLL) or "Here again." in browser.text(".turns"), "its second call")
    assert browser.one("#call-1 .stream").is_displayed()
    engine.say(engine.family.speak("Once more."))
    session.ask("a third time")
    browser.wait(lambda: browser.run(SCROLL) or "Once more." in browser.text(".turns"), "its third call")
    starts = browser.run(STARTS)
    assert starts == sorted(starts) and starts.count(1) == 1 and starts[-1] > 1
    browser.wait(lambda: len(browser.all("[data-tree] a")) == 3, "its tree")
    session.close(reward=0.5)
    browser.wait(lambda: browser.text("[data-pause]") == "ended", "the end of following")
    assert browser.text("[data-live=head] .state") == "completed" and not browser.one("[data-pause]").is_enabled()


def test_ids_prompts_and_commands_are_copied_by_keys_alone(browser: Browser, service: RunningService) -> None:
    browser.driver.execute_cdp_cmd(
        "Browser.grantPermissions", {"permissions": ["clipboardReadWrite", "clipboardSanitizedWrite"], "origin": service.url}
    )
    opened(browser, service, "/ui/sessions/agent")
    for label, copied in (
        ("Copy id", "agent"),
        ("Copy curl", f'curl -H "Authorization: Bearer $VERBATIM_ADMIN_TOKEN" {service.url}/sessions/agent'),
        ("Copy audit", "verbatim audit agent"),
        ("Copy prompt", "Implement to_roman(n) in roman.py. The tests are in tests/."),
    ):
        find = "return [...document.querySelectorAll('button.copy')].find((e) => e.checkVisibility() && e.textContent === arguments[0])"
        button = browser.run(find, label)
        browser.run("arguments[0].focus()", button)
        browser.press(Keys.ENTER)
        browser.wait(partial(browser.run, "return arguments[0].textContent === 'Copied'", button), label)
        read = "const done = arguments[0]; navigator.clipboard.readText().then(done, (error) => done(String(error)))"
        assert browser.driver.execute_async_script(read) == copied


@pytest.mark.usefixtures("hurrying")
def test_members_of_a_group_arrive_while_two_are_being_chosen(browser: Browser, service: RunningService) -> None:
    service.session(session_id="member-1", group_id="arriving", group_size=2).close("timeout", reward=0.0)
    opened(browser, service, "/ui/groups/arriving")
    browser.run("document.querySelector('input[value=member-1]').checked = true")
    service.session(session_id="member-2", group_id="arriving", group_size=2).close("timeout", reward=1.0)
    browser.wait(lambda: "member-2" in browser.text("[data-live=members]"), "the second member")
    assert browser.run("return [...document.querySelectorAll('[name=chosen]')].map((box) => box.checked)") == [True, False]


def test_two_members_of_a_group_are_compared(browser: Browser, service: RunningService) -> None:
    opened(browser, service, "/ui/groups/bug%207%2Fa%26b")
    button = browser.one("[data-compare] button")
    assert not button.is_enabled()
    for name in ("rich", "poor"):
        browser.one(f"input[value={name}]").click()
    button.click()
    browser.wait(lambda: "side by side" in browser.text("h1"), "the comparison")
    assert "the same in 2 messages" in browser.text("main")
    assert browser.all(".pair.same") == []
    first = browser.all(".pair")[1].text
    assert "First look the number up." in first and "I give up." in first
    browser.press("p")
    browser.wait(lambda: browser.all(".pair.same"), "what both began with")
    assert browser.text(".pair.same") == "2 equal messages"
    browser.one(".pair.same > summary").click()
    assert "system prompt" in browser.text(".pair.same")


def shown_row(browser: Browser, number: int, length: int) -> list[tuple[str, list[str]]]:
    """The text and the classes of each token of an exported row, once it is shown."""
    row = f"[data-tokens='rows/{number}']"
    browser.run("document.querySelector(arguments[0]).open = true", row)
    browser.wait(lambda: f"of {length}." in told(browser, f"{row} [data-where]"), "the row's tokens")
    tokens = "return [...document.querySelectorAll(arguments[0])].map((t) => [t.textContent, [...t.classList]])"
    return [(text, classes) for text, classes in browser.run(tokens, f"{row} .stream .t")]


def rows_are_put_together(browser: Browser, service: RunningService, engine: ScriptedEngine) -> None:
    """The file stores each call's own tokens; what the browser makes of them are the rows that the API gives."""
    rows = service.request("GET", "/sessions/rich/trajectories").json()["trajectories"]
    assert len(rows) > 1
    for number, row in enumerate(rows):
        shown = shown_row(browser, number, len(row["token_ids"]))
        assert "".join(text for text, _ in shown).replace("↵", "").replace("·", "") == engine.family.decode(row["token_ids"])
        assert [int("k1" in classes) for _, classes in shown] == row["loss_mask"]
        for version, start, end in row["weight_versions"]:
            assert all(f"v{version}" in classes for _, classes in shown[start:end])


def test_an_exported_session_is_looked_at_without_the_service(
    browser: Browser, service: RunningService, engine: ScriptedEngine, tmp_path: Path
) -> None:
    for name in ("rich", "hostile", "agent"):
        answer = service.request("GET", f"/ui/sessions/{name}/download/page.html")
        (tmp_path / f"{name}.html").write_bytes(answer.content)
    browser.open(f"file://{tmp_path}/hostile.html")
    unfold(browser)
    assert "owned" not in browser.driver.title and browser.all("img") == []
    browser.open(f"file://{tmp_path}/rich.html")
    rows_are_put_together(browser, service, engine)
    assert browser.barriers() == []
    browser.run("document.querySelector('[data-tree] a').focus()")
    browser.press(Keys.ARROW_RIGHT, Keys.ENTER)
    browser.wait(lambda: browser.driver.current_url.endswith("#call-2"), "the call that was chosen in the tree")
    assert "It is 42" in browser.text("#call-2 .reply")
    browser.one("#call-2 .about > summary").click()
    card = "#call-2 [data-card]"
    browser.wait(lambda: "mask 1" in browser.text(card) and "weights" in browser.text(card), "its tokens")
    browser.press("c", "c")
    assert "weights 3" in browser.text("#call-2 [data-legend]")
    loaded = browser.run("return performance.getEntriesByType('resource').length")
    assert loaded == 0
    browser.resize(*PHONE, phone=True)
    assert browser.run("return document.documentElement.scrollWidth") <= PHONE[0]
    assert browser.driver.find_element(By.TAG_NAME, "h1").text == "Session rich"


def test_an_exported_session_is_searched_without_the_service(browser: Browser, service: RunningService, tmp_path: Path) -> None:
    saved = tmp_path / "agent.html"
    saved.write_bytes(service.request("GET", "/ui/sessions/agent/download/page.html").content)
    browser.open(f"file://{saved}")
    unfolded = "return document.querySelector('#fork-3').open"
    assert "AssertionError" in browser.text(".verdict") and not browser.run(unfolded)
    browser.press("/", "smaller sign")
    browser.wait(lambda: browser.text("[data-found]") == "2 calls found", "the calls")
    assert browser.run(unfolded) and not browser.one("#fork-6").is_displayed()
    assert [turn.get_attribute("id") for turn in browser.all(".turn:not([hidden])")] == ["call-4", "call-5"]


def test_an_exported_session_tells_weight_versions_of_any_size(
    browser: Browser, service: RunningService, tmp_path: Path
) -> None:
    """A trainer that counts in milliseconds has versions beyond 32 bits."""
    talk = Talk("late")
    talk.say("c1", [5, 6, 7], [8, 9], version=1_767_225_600_000)
    imported(service, talk, reward=0.5)
    (tmp_path / "late.html").write_bytes(service.request("GET", "/ui/sessions/late/download/page.html").content)
    browser.open(f"file://{tmp_path}/late.html")
    browser.one("#call-1 .about > summary").click()
    browser.wait(lambda: browser.all(".stream .t"), "tokens")
    browser.press("c", "c")
    assert "weights 1767225600000" in browser.text("[data-legend]")
