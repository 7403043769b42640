"""The pages of /ui without a browser: who gets in, and that what they show is what the API says."""

from __future__ import annotations

import html
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import msgspec
import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from cli.main import app
from proxy.auth import Role, Tokens, check_same_site
from proxy.errors import Forbidden
from proxy.settings import GivenToken, Settings
from proxy.ui.pictures import MOST_RUNS, Rewards, draw_tree
from proxy.ui.router import COOKIE, is_valid, sign_until
from proxy.ui.session_view import PREVIEW_CHARACTERS, preview_reply
from proxy.ui.tokens import CONTEXT, PROMPT
from tests.support.engine.local_format import QWEN3, require_renderers, write_format
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service import plain_http
from tests.support.service.redis_server import RedisServer, running_redis
from tests.support.service.running_service import ADMIN, TRAINER, RunningService
from tests.support.service.ui_sessions import (
    FEEDBACK,
    GROUP,
    PAGES,
    PROBE,
    agent_session,
    group_of_four,
    hostile_session,
    imported,
    picture_session,
    shown_engine,
    shown_service,
    summary,
)
from tests.support.sessions.calls import Talk
from tests.support.sessions.stored_scores import scored

__all__ = ["shown_engine", "shown_service"]
SHOWN = (group_of_four, agent_session, picture_session, hostile_session)
PLACE = re.compile(r"\{\w+\}")


def page(service: RunningService, path: str, **query: Any) -> str:
    answer = service.request("GET", path, params=query)
    assert answer.status_code == 200, answer.text
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert "unsafe" not in answer.headers["content-security-policy"]
    return answer.text


def plain(service: RunningService, method: str, path: str, **more: Any) -> httpx.Response:
    return plain_http.request(method, service.url + path, **more)


# Who gets in


@pytest.mark.parametrize("endpoint", [each for each, role in PAGES.items() if role in ("page", "data")], ids=" ".join)
def test_pages_open_to_the_admin_alone(service: RunningService, endpoint: tuple[str, str]) -> None:
    key = service.session().api_key
    path = PLACE.sub("nowhere", endpoint[1]).replace("/nowhere/nowhere/", "/calls/nowhere/")
    query = {"id": "nowhere", "left": "nowhere", "right": "nowhere", "what": "surprise"}
    for secret, status in ((None, 401), ("wrong", 401), (TRAINER, 403), (key, 403), (ADMIN, None)):
        headers = {} if secret is None else {"Authorization": f"Bearer {secret}"}
        answer = plain(service, endpoint[0], path, headers=headers, params=query)
        assert answer.status_code == status or (status is None and answer.status_code in (200, 400, 404)), answer.text
        if status is not None and PAGES[endpoint] == "page":
            assert "<h1>Log in</h1>" in answer.text
        assert secret is None or secret not in answer.text
    assert plain(service, endpoint[0], path, params={**query, "key": ADMIN}).status_code == 401


def test_a_browser_at_the_address_of_the_service_is_led_to_the_pages(service: RunningService) -> None:
    led = plain(service, "GET", "/", headers={"Accept": "text/html,application/xhtml+xml,*/*;q=0.8"})
    assert (led.status_code, led.headers["location"]) == (307, "/ui")
    asked = plain(service, "GET", "/")
    assert (asked.status_code, asked.json()) == (404, {"error": {"code": "not_found", "message": "GET /: Not Found"}})


def test_a_log_in_gives_a_cookie_that_is_no_token_and_opens_the_pages_alone(service: RunningService) -> None:
    refused = plain(service, "POST", "/ui/login", data={"token": TRAINER})
    assert refused.status_code == 403 and "set-cookie" not in refused.headers
    answer = plain(service, "POST", "/ui/login", data={"token": f" {ADMIN}\n", "next": "/ui/groups?q=a"})
    assert (answer.status_code, answer.headers["location"]) == (303, "/ui/groups?q=a")
    given = answer.headers["set-cookie"]
    assert {"HttpOnly", "SameSite=strict", "Path=/ui"} <= set(given.split("; ")) and ADMIN not in given
    cookies = {COOKIE: answer.cookies[COOKIE]}
    assert plain(service, "GET", "/ui", cookies=cookies).status_code == 200
    assert plain(service, "GET", "/sessions", cookies=cookies).status_code == 401
    # What another site sends comes without it, and ends no log-in.
    assert "set-cookie" not in plain(service, "POST", "/ui/logout").headers
    assert 'verbatim_ui=""' in plain(service, "POST", "/ui/logout", cookies=cookies).headers["set-cookie"]


def test_a_cookie_that_was_logged_out_opens_nothing_in_any_process(service: RunningService) -> None:
    """It was valid for the rest of its twelve hours, for whoever had copied it."""
    given = [plain(service, "POST", "/ui/login", data={"token": ADMIN}).cookies[COOKIE] for _ in range(2)]
    out, other = ({COOKIE: value} for value in given)
    assert plain(service, "POST", "/ui/logout", cookies=out).status_code == 200
    assert plain(service, "GET", "/ui", cookies=other).status_code == 200
    with RunningService("http://127.0.0.1:9", str(service.settings.redis)) as second:
        for each in (service, second):
            assert plain(each, "GET", "/ui", cookies=out).status_code == 401
            assert "set-cookie" not in plain(each, "POST", "/ui/logout", cookies=out).headers
        assert plain(second, "GET", "/ui", cookies=other).status_code == 200


@pytest.mark.parametrize("origin", ["https://evil.example", "null", "http://127.0.0.1:1", "http://localhost.evil.example", ""])
def test_a_log_in_that_another_site_sends_is_refused(service: RunningService, origin: str) -> None:
    answer = plain(service, "POST", "/ui/login", data={"token": ADMIN}, headers={"Origin": origin})
    assert answer.status_code == 403 and "set-cookie" not in answer.headers
    cookies = {
        COOKIE: plain(service, "POST", "/ui/login", data={"token": ADMIN}, headers={"Origin": service.url}).cookies[COOKIE]
    }
    refused = plain(service, "POST", "/ui/logout", cookies=cookies, headers={"Origin": origin})
    assert refused.status_code == 403 and plain(service, "GET", "/ui", cookies=cookies).status_code == 200


def test_a_log_in_behind_a_gateway_is_known_by_the_public_url_or_by_what_the_browser_says() -> None:
    for origin in ("https://verbatim.example", "https://verbatim.example:443"):
        check_same_site({"host": "proxy:8700", "origin": origin}, "https://verbatim.example/")
    check_same_site({"host": "proxy:8700", "origin": "https://verbatim.example", "sec-fetch-site": "same-origin"}, None)
    check_same_site({"host": "proxy:8700"}, None)
    for headers in ({}, {"sec-fetch-site": "cross-site"}, {"sec-fetch-site": "same-site"}):
        with pytest.raises(Forbidden, match="VERBATIM_PUBLIC_URL"):
            check_same_site({"host": "proxy:8700", "origin": "https://verbatim.example", **headers}, None)


@pytest.mark.parametrize("wanted", ["//evil.example", "https://evil.example", "/ui\\@evil", "/uieval", "/sessions", ""])
def test_a_log_in_leads_to_no_other_place(service: RunningService, wanted: str) -> None:
    answer = plain(service, "POST", "/ui/login", data={"token": ADMIN, "next": wanted})
    assert answer.headers["location"] == "/ui"


def test_a_cookie_ends_with_its_time_and_with_its_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text("first-token-of-the-test\nsecond-token-of-the-test\n")
    now = [0.0]
    tokens = Tokens(
        Settings(admin_token=GivenToken(file=file), trainer_token=GivenToken(token=SecretStr("trainer"))).tokens,
        clock=lambda: now[0],
    )
    first, second = tokens.digests_of(Role.ADMIN)
    cookie = sign_until(first, 1000, "a")
    assert is_valid(tokens, cookie, lambda: 999.0) and is_valid(tokens, sign_until(second, 1000, "b"), lambda: 999.0)
    assert not is_valid(tokens, cookie, lambda: 1001.0)
    assert not is_valid(tokens, "2000" + cookie[4:], lambda: 999.0)
    assert not is_valid(tokens, cookie.replace(".a.", ".b."), lambda: 999.0)
    (trainer,) = tokens.digests_of(Role.TRAINER)
    assert not is_valid(tokens, sign_until(trainer, 1000, "a"), lambda: 999.0)
    file.write_text("second-token-of-the-test\n")
    now[0] = 10.0
    assert not is_valid(tokens, cookie, lambda: 999.0)


def test_an_open_service_shows_its_pages_to_its_own_machine(redis_server: RedisServer, engine: ScriptedEngine) -> None:
    settings: dict[str, Any] = {"admin_token": None, "trainer_token": None, "host": "127.0.0.1"}
    with RunningService(engine.url, redis_server.url, engine_api="token", open=True, **settings) as service:
        assert plain(service, "GET", "/ui").status_code == 200
        assert plain(service, "GET", "/ui", headers={"Origin": "https://evil.example"}).status_code == 403


# What they show


def test_the_token_view_shows_what_the_api_gives(service: RunningService, engine: ScriptedEngine) -> None:
    """Ids, logprobs and versions of every call; masks against the rows; texts that together are what the ids decode to."""
    calls = service.request("GET", "/sessions/rich/calls").json()["calls"]
    assert {span[0] for call in calls for span in call["weight_versions"]} == {3, 4}
    for call in calls:
        shown = service.request("GET", f"/ui/sessions/rich/calls/{call['call_id']}/tokens", params={"count": 1000}).json()
        prompt, sampled = len(call["prompt_ids"]), len(call["completion_ids"])
        assert shown["ids"] == [*call["prompt_ids"], *call["completion_ids"]]
        assert shown["logprobs"][prompt:] == pytest.approx(call["logprobs"], abs=1e-4)
        assert shown["kinds"][prompt:] == "1" * sampled and "1" not in shown["kinds"][:prompt]
        assert [run[0] for run in shown["versions"] if run[2] == prompt + sampled] == [call["weight_versions"][-1][0]]
        assert "".join(shown["texts"]) == engine.family.decode(shown["ids"])


def test_a_row_is_shown_under_its_own_mask(service: RunningService) -> None:
    for row in service.request("GET", "/sessions/rich/trajectories").json()["trajectories"]:
        path = f"/ui/sessions/rich/rows/{row['trajectory_id']}/tokens"
        shown = service.request("GET", path, params={"count": 1000}).json()
        assert shown["ids"] == row["token_ids"]
        assert [int(kind == "1") for kind in shown["kinds"]] == row["loss_mask"]
        trained = [logprob for logprob, mask in zip(shown["logprobs"], row["loss_mask"], strict=True) if mask]
        assert trained == pytest.approx([each for each in row["logprobs"] if each], abs=1e-4)


def test_pages_of_tokens_are_cut_from_one_list_and_characters_survive_the_cuts(service: RunningService) -> None:
    call_id = service.request("GET", "/sessions/rich/calls").json()["calls"][1]["call_id"]
    path = f"/ui/sessions/rich/calls/{call_id}/tokens"
    whole = service.request("GET", path, params={"count": 1000}).json()
    first = "".join(map(str, (text or "" for text in whole["texts"]))).index("日")
    assert first > 0
    parts = [service.request("GET", path, params={"start": at, "count": 7}).json() for at in range(0, whole["total"], 7)]
    assert [one for part in parts for one in part["ids"]] == whole["ids"]
    assert "".join(part["kinds"] for part in parts) == whole["kinds"]
    assert sum(text is None for part in parts for text in part["texts"]) <= 2 * len(parts)


def test_what_comes_next_is_found_behind_the_token_alone(service: RunningService) -> None:
    row = service.request("GET", "/sessions/rich/trajectories").json()["trajectories"][0]
    path = f"/ui/sessions/rich/rows/{row['trajectory_id']}/next"

    def following(**query: Any) -> int | None:
        found: int | None = service.request("GET", path, params=query).json()["position"]
        return found

    surprises = [at for at, logprob in enumerate(row["logprobs"]) if logprob < -3]
    assert following(what="surprise") == surprises[0]
    assert following(what="surprise", after=surprises[0]) == surprises[1]
    assert following(what="surprise", after=surprises[-1]) is None
    assert following(what="kind") == row["loss_mask"].index(1)
    assert following(what="id", value=row["token_ids"][5], after=4) == 5
    assert following(what="version") == row["loss_mask"].index(1)
    assert following(what="version", after=row["loss_mask"].index(1)) is None


def test_a_session_gets_a_flag_and_a_note_on_its_page(service: RunningService) -> None:
    session = service.session()
    path = f"/ui/sessions/{session.session_id}"
    answer = service.request("POST", f"{path}/review", data={"flag": "good", "note": '"><b>'}, follow_redirects=True)
    assert str(answer.url).endswith(path) and 'name="flag" value="good"' in answer.text
    assert 'value="&#34;&gt;&lt;b&gt;"' in answer.text
    assert service.request("POST", f"{path}/review", data={"flag": "<b>"}).status_code == 400
    foreign = service.request("POST", f"{path}/review", data={}, headers={"Origin": "https://evil.example"})
    assert foreign.status_code == 403
    assert service.request("GET", f"/sessions/{session.session_id}").json()["flag"] == "good"
    service.request("POST", f"{path}/review", data={})
    assert service.request("GET", f"/sessions/{session.session_id}").json()["flag"] is None


def test_downloads_are_what_the_api_gives(service: RunningService) -> None:
    def download(name: str) -> bytes:
        answer = service.request("GET", f"/ui/sessions/rich/download/{name}")
        assert answer.status_code == 200 and "attachment" in answer.headers["content-disposition"]
        return answer.content

    calls = service.request("GET", "/sessions/rich/calls").json()["calls"]
    assert msgspec.json.decode(download("calls.json"))["calls"] == calls
    assert msgspec.json.decode(download("trajectories.json")) == service.request("GET", "/sessions/rich/trajectories").json()
    record = service.request("GET", "/sessions/rich/records").content
    assert msgspec.msgpack.decode(download("record.msgpack")) == msgspec.msgpack.decode(record)
    assert service.request("GET", "/ui/sessions/rich/download/passwords").status_code == 404


def test_the_calls_of_a_long_session_are_downloaded_one_by_one(service: RunningService) -> None:
    """Each tells its whole prompt: all at once they are many times what the store holds."""
    talk, new = Talk("wide"), list(range(2000, 2100))
    talk.say("c1", new, [8, 9])
    for number in range(2, 121):
        talk.go_on(f"c{number}", f"c{number - 1}", new, [8, 9])
    imported(service, talk, reward=-1.0)
    service.request("GET", "/ui/sessions/wide")
    tracemalloc.start()
    try:
        told = service.request("GET", "/ui/sessions/wide/download/calls.json").content
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The client here has it all, in pieces and as a whole.
    assert len(told) > 3_000_000
    assert most < 4 * len(told)
    assert [call["prompt_ids"] for call in msgspec.json.decode(told)["calls"]] == [
        talk.full[call.call_id][:-2] for call in talk.calls
    ]


def test_view_writes_a_session_into_one_file(service: RunningService, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERBATIM_URL", service.url)
    monkeypatch.setenv("VERBATIM_ADMIN_TOKEN", ADMIN)
    target = tmp_path / "rich.html"
    done = CliRunner().invoke(app, ["view", "rich", "--out", str(target)])
    assert (done.exit_code, done.output.strip()) == (0, str(target))
    text = target.read_text("utf-8")
    assert "First look the number up." in text and "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", text)
    missing = CliRunner().invoke(app, ["view", "nobody"])
    assert "there is no session nobody" in str(missing.exception)


def test_an_exported_file_is_no_larger_for_branches_that_lean_on_the_same_tokens(
    service: RunningService, engine: ScriptedEngine
) -> None:
    """Fifty rows of 20,000 tokens each, all but four of which they share: together a million."""
    talk, vocabulary = Talk("bush"), engine.family.tokenizer.get_vocab_size()
    talk.say("c1", [at % vocabulary for at in range(20_000)], [8, 9])
    for number in range(2, 52):
        talk.go_on(f"c{number}", "c1", [number], [number + 100], reason="repeated")
    imported(service, talk, reward=-1.0)
    assert "Row 50 " in page(service, "/ui/sessions/bush")
    assert len(service.request("GET", "/ui/sessions/bush/download/page.html").content) < 1_000_000


def test_hostile_text_is_escaped_wherever_it_stands(service: RunningService) -> None:
    call_id = service.request("GET", "/sessions/hostile/calls").json()["calls"][0]["call_id"]
    paths = ["/ui", "/ui/groups", "/ui/sessions/hostile", "/ui/sessions/hostile/turns"]
    pages = [page(service, path, q="") for path in paths] + [page(service, f"/ui/groups/{quote(PROBE, safe='')}")]
    pages.append(service.request("GET", "/ui/sessions/hostile/download/page.html").text)
    pages.append(service.request("GET", f"/ui/groups/{quote(PROBE + '!', safe='')}").text)
    for text in pages:
        assert "<img" not in text and "<script>document" not in text and "\u202e" not in text
        assert "&lt;img src=x" in text
    assert "&lt;<mark>img</mark> src=x" in page(service, "/ui/sessions/hostile", q="img")
    whole = service.request("GET", f"/ui/sessions/hostile/calls/{call_id}/messages/0")
    assert whole.headers["content-type"].startswith("text/plain") and whole.headers["x-content-type-options"] == "nosniff"


def test_a_reward_of_zero_is_explained_in_the_list_and_at_the_head_of_the_session(service: RunningService) -> None:
    first = html.escape(FEEDBACK.splitlines()[1], quote=True).replace("&#x27;", "&#39;")
    assert first in page(service, "/ui")
    head = page(service, "/ui/sessions/agent").partition("<aside")[0]
    assert '<b class="reward bad">0</b>' in head and first in head and "+ IIII" in head
    assert "The evaluator gave no feedback." in page(service, "/ui/sessions/poor")


def test_the_log_of_the_agent_stands_beside_its_conversation(service: RunningService) -> None:
    for path in ("/ui/sessions/agent", "/ui/sessions/agent/download/page.html"):
        assert "$ agent --print" in service.request("GET", path).text
    assert service.request("PUT", "/sessions/nobody/log", json={"text": "x"}).status_code == 404
    session = service.session(session_id="logged")
    assert service.request("PUT", "/sessions/logged/log", json={"text": "<b>first</b>"}).status_code == 204
    assert "&lt;b&gt;first&lt;/b&gt;" in page(service, "/ui/sessions/logged")
    session.close("failed")
    assert service.request("DELETE", "/sessions/logged").status_code == 204
    service.session(session_id="logged")
    assert "first" not in page(service, "/ui/sessions/logged")


def test_a_page_reads_as_the_run_went_and_forks_are_loaded_when_opened(service: RunningService) -> None:
    """Calls 3 and 4 are a sub-agent's and 6 is a compaction: both are folded after the call at which they began."""
    shown = page(service, "/ui/sessions/agent")
    assert re.findall(r'id="((?:call|fork)-\d)"', shown) == [f"{kind}-{number}" for kind, number in READING_ORDER]
    assert "quarantined: role_compaction" in shown and "a smaller sign before" not in shown.partition('id="fork-3"')[0]
    load = html.unescape(re.findall(r'id="fork-3" data-load="([^"]+)"', shown)[0])
    fork = service.request("GET", load).text
    assert re.findall(r'id="(call-\d)"', fork) == ["call-3", "call-4"] and "docs/rules.md: IV is 4" in fork
    assert "<html" not in fork


READING_ORDER = [("call", 1), ("call", 2), ("fork", 3), ("call", 5), ("fork", 6), ("call", 7), ("call", 8)]


def test_a_link_to_a_call_of_a_fork_shows_the_fork(service: RunningService) -> None:
    call_id = service.request("GET", "/sessions/agent/calls").json()["calls"][3]["call_id"]
    shown = page(service, "/ui/sessions/agent", at=call_id, token=5)
    assert re.findall(r'id="(call-\d)"', shown) == ["call-3", "call-4"] and "Sub-agent</b> after" in shown
    assert re.findall(r'data-position="(\d+)"[^>]* open>', shown) == ["5"]
    assert service.request("GET", "/ui/sessions/agent", params={"at": "nowhere"}).status_code == 404


def test_the_details_of_a_call_name_its_sampling_and_its_parent(service: RunningService) -> None:
    call_id = service.request("GET", "/sessions/rich/calls").json()["calls"][1]["call_id"]
    shown = page(service, f"/ui/sessions/rich/calls/{call_id}/details")
    assert "call 1</a>" in shown and "<dt>logprobs</dt><dd>raw</dd>" in shown and "chat, token path" in shown


def test_images_come_from_the_service_alone(service: RunningService) -> None:
    """One by URL is not fetched, and SVG, which may hold scripts, is not shown as an image."""
    shown = page(service, "/ui/sessions/picture")
    (source,) = re.findall(r'<img loading="lazy" src="([^"]+)"', shown)
    image = service.request("GET", source)
    assert (image.headers["content-type"], image.content[:4]) == ("image/png", b"\x89PNG")
    assert shown.count("not text") == 2 and "data:image/svg+xml" in shown
    assert service.request("GET", source[:-1] + "1").status_code == 404
    saved = service.request("GET", "/ui/sessions/picture/download/page.html").text
    assert re.findall(r'<img loading="lazy" src="(\w+:image/\w+)', saved) == ["data:image/png"]


def test_sessions_and_calls_are_found_by_what_is_looked_for(service: RunningService) -> None:
    def found(**query: str) -> list[str]:
        return re.findall(r'data-item href="/ui/sessions/([\w.-]+)"', page(service, "/ui", **query))

    assert found(q="SPLIT") == ["rich"]
    assert found(at_least="0.5") == ["fair", "rich", "picture"]
    assert found(q="assert 'IIII'") == ["agent"]
    assert found(at_least="0.1", at_most="0.9", q="bug-7") == ["fair"]
    assert found(status="failed") == ["failed"]
    calls = page(service, "/ui/sessions/rich", q="then mend")
    assert "1 call found." in calls and "Mended." in calls and "It is 42" not in calls
    assert "No call matches" in page(service, "/ui/sessions/rich", only="quarantined")
    assert "mean 0.5" in page(service, "/ui/groups", q=GROUP)


def test_a_text_is_found_in_the_messages_of_many_sessions(service: RunningService) -> None:
    """Tool outputs, replies, reasoning and prompts, in any case, with the place that has it."""

    def found(**query: str) -> list[str]:
        return re.findall(r'data-item href="/ui/sessions/([\w.-]+)', page(service, "/ui", **{"in": "texts"}, **query))

    assert found(q="DOCS/RULES.MD") == ["agent"] and found(q="naïve 日本 🙂") == ["failed", "fair", "poor", "rich"][1:]
    assert found(q="docs/rules.md", at_least="0.5") == [] and found(q="no such text") == []
    text = page(service, "/ui", **{"in": "texts", "q": "a smaller SIGN before"})
    assert "Four is written IV: <mark>a smaller sign before</mark> a larger one" in text
    assert 'href="/ui/sessions/agent?q=a+smaller+SIGN+before"' in text
    hostile = page(service, "/ui", **{"in": "texts", "q": PROBE})
    assert "hostile" in hostile and PROBE not in hostile


def test_a_search_that_matches_everything_is_bounded_says_so_and_goes_on(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    everything = page(service, "/ui", **{"in": "texts", "q": "e"})
    all_found = re.findall(r'data-item href="/ui/sessions/([\w.-]+)', everything)
    for name, most in (("MOST_SESSIONS", 2), ("MOST_BYTES", 1)):
        with monkeypatch.context() as bounded:
            bounded.setattr(f"proxy.ui.searching.{name}", most)
            path, seen = "/ui?in=texts&q=e", []
            for _ in range(40):
                text = service.request("GET", path).text
                seen += re.findall(r'data-item href="/ui/sessions/([\w.-]+)', text)
                following = re.search(r'data-key="next" href="([^"]+)"', text)
                if following is None:
                    break
                assert "Search on" in text
                path = following[1].replace("&amp;", "&")
            assert seen == all_found and len(seen) > 4
    assert re.search(r"Searched the newest \d+ sessions that the other filters let through, 0\.\d MiB of messages", everything)


def test_a_member_whose_time_ran_out_without_a_reward_has_failed_its_group(service: RunningService) -> None:
    for name, fields in (("slow", {}), ("slow-but-judged", {"reward": 0.0})):
        service.session(session_id=name, group_id="slow", group_size=3).close("timeout", **fields)
    unjudged = service.session(session_id="unjudged", group_id="slow", group_size=3)
    unjudged.ask("q")
    unjudged.close()
    assert "<dt>failed</dt><dd>1</dd>" in page(service, "/ui/groups/slow")


def test_a_session_that_failed_before_its_first_call_says_why(service: RunningService) -> None:
    shown = page(service, "/ui/sessions/failed")
    assert '<pre class="refused">the agent crashed</pre>' in shown and shown.count("No call is recorded.") == 2


@pytest.mark.parametrize("text", ["long " * 40, "x" + " " * 700 + "y"])
def test_a_preview_of_a_reply_shows_that_it_was_cut(text: str) -> None:
    preview, _ = preview_reply({"content": text})
    assert preview.endswith("…") and len(preview) <= PREVIEW_CHARACTERS


@pytest.fixture
def own_redis() -> Iterator[RedisServer]:
    """In that of the others there are weights that a new engine lacks."""
    with running_redis() as server:
        yield server


def test_an_engine_that_spells_nothing_is_no_obstacle(own_redis: RedisServer) -> None:
    """Ids are shown then, and why; nothing is asked again for every page."""
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, own_redis.url, engine_api="token") as service:
        session = service.session()
        session.ask("q", max_tokens=4)
        call_id = session.calls[0]["call_id"]
        engine._routes.pop(("POST", "/v1/completions/derender"))
        path = f"/ui/sessions/{session.session_id}/calls/{call_id}/tokens"
        for _ in range(2):
            shown = service.request("GET", path).json()
            assert set(shown["texts"]) == {None} and "does not spell" in shown["missing"]
        assert engine.paths().count("/v1/completions/derender") == 1


def test_texts_come_from_engines_on_the_chat_path_too(own_redis: RedisServer) -> None:
    with ScriptedEngine("qwen3") as engine, RunningService(engine.url, own_redis.url, engine_api="chat") as service:
        session = service.session()
        engine.say(engine.family.speak("naïve 日本 🙂"))
        session.ask("q")
        call_id = session.calls[0]["call_id"]
        shown = service.request("GET", f"/ui/sessions/{session.session_id}/calls/{call_id}/tokens").json()
        assert "".join(shown["texts"]) == engine.family.decode(shown["ids"])


def test_the_renderers_tokenizer_spells_for_engines_that_are_rendered_for(own_redis: RedisServer, tmp_path: Path) -> None:
    require_renderers()
    options: dict[str, Any] = {"renderer": str(write_format("qwen3", tmp_path)), "renderer_options": QWEN3}
    with (
        ScriptedEngine("qwen3") as engine,
        RunningService(engine.url, own_redis.url, engine_api="completions", **options) as service,
    ):
        session = service.session()
        engine.say(engine.family.speak("naïve 日本 🙂"))
        session.ask("q")
        call_id = session.calls[0]["call_id"]
        shown = service.request("GET", f"/ui/sessions/{session.session_id}/calls/{call_id}/tokens").json()
        assert "".join(shown["texts"]) == engine.family.decode(shown["ids"])
        assert not [path for path in engine.paths() if "tokenize" in path or "derender" in path]


def test_a_page_has_its_texts_however_little_is_remembered(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    call_id = service.request("GET", "/sessions/rich/calls").json()["calls"][0]["call_id"]
    path = f"/ui/sessions/rich/calls/{call_id}/tokens"
    told = service.request("GET", path).json()
    monkeypatch.setattr("proxy.ui.tokens.CACHED_GROUPS", 3)
    for _ in range(2):
        assert service.request("GET", path).json() == told
    assert service.request("GET", "/ui/sessions/rich/download/page.html").status_code == 200


def test_what_else_could_have_been_sampled_is_told_with_each_token(service: RunningService) -> None:
    session = service.session(sampling={"top_logprobs": 2})
    session.ask("q", max_tokens=4)
    call_id = session.calls[0]["call_id"]
    (row,), _ = session.trajectories()
    shown = service.request("GET", f"/ui/sessions/{session.session_id}/calls/{call_id}/tokens").json()
    sampled = [at for at, mask in enumerate(row["loss_mask"]) if mask]
    assert sorted(map(int, shown["alternatives"])) == sampled
    for at in sampled:
        told = shown["alternatives"][str(at)]
        assert [token for token, _, _ in told] == row["top_token_ids"][at]
        assert [logprob for _, _, logprob in told] == pytest.approx(row["top_logprobs"][at], abs=1e-4)


def test_the_tokens_of_a_row_are_shown_with_what_scorers_say_of_them(service: RunningService) -> None:
    """Also to a page that was opened before they were scored."""
    session = service.session()
    session.ask("q", max_tokens=4)
    (row,), _ = session.trajectories()
    path = f"/ui/sessions/{session.session_id}/rows/{row['trajectory_id']}/tokens"
    assert service.request("GET", path).json()["scores"] == {}
    scored(service, session.session_id, "teacher", top_k=0)
    (row,), _ = session.trajectories()
    assert service.request("GET", path).json()["scores"] == {"teacher": row["scores"]["teacher"]["logprobs"]}


# Pictures


def test_a_small_tree_is_drawn_call_by_call() -> None:
    """1 - 2 - 3, and 4 branches off 1."""
    picture = draw_tree([summary(1, None), summary(2, 1), summary(3, 2), summary(4, 1, "edited")])
    assert [box.label for box in picture.boxes] == ["1", "2", "3", "4"]
    assert len({box.y for box in picture.boxes[:3]}) == 1 and picture.boxes[3].y > picture.boxes[0].y
    assert picture.boxes[3].x == picture.boxes[1].x and len(picture.lines) == 3 and picture.left_out == 0


def test_a_large_tree_is_drawn_in_runs_and_every_call_is_counted() -> None:
    run = [summary(number, number - 1 or None) for number in range(1, 1001)]
    picture = draw_tree(run)
    assert [box.count for box in picture.boxes] == [1000]
    bush = draw_tree([summary(1, None), *(summary(number, 1, "repeated") for number in range(2, 1001))])
    assert len(bush.boxes) == MOST_RUNS and bush.left_out == 1000 - MOST_RUNS


@pytest.mark.parametrize("values", [[1.0], [0.5, 0.5], [-1e308, 1e308], [0.0, 1e-300], [1.0, 2.0, 3.0, float("nan")]])
def test_rewards_of_any_size_have_a_picture(values: list[float]) -> None:
    rewards = Rewards.of((str(at), value) for at, value in enumerate(values))
    assert rewards is not None
    assert sum(bar.count for bar in rewards.bars()) == len(rewards.values) == len(rewards.dots())
    assert all(0 <= dot.x <= 240 and 0 <= dot.y <= 26 for dot in rewards.dots())
    assert all(0 <= bar.height <= 90 for bar in rewards.bars())


def test_a_replayed_call_is_shown_as_another_sessions(service: RunningService) -> None:
    origin = service.session()
    origin.ask("q")
    fork = service.session(replay={"session_id": origin.session_id})
    fork.ask("q")
    (call,) = fork.calls
    text = page(service, f"/ui/sessions/{fork.session_id}")
    assert f"replayed from {origin.session_id}" in text
    assert f"; {len(call['completion_ids'])} replayed from other sessions" in text
    shown = service.request("GET", f"/ui/sessions/{fork.session_id}/calls/{call['call_id']}/tokens").json()
    assert shown["kinds"] == str(PROMPT) * len(call["prompt_ids"]) + str(CONTEXT) * len(call["completion_ids"])


def test_a_pivot_is_worth_what_its_forks_got(service: RunningService) -> None:
    """Three forks of one call; one more left the recorded run before it, which says nothing of the call."""
    origin = service.session()
    said = origin.answer("q")
    messages = [{"role": "user", "content": "q"}, said, {"role": "user", "content": "r"}]
    origin.ask(messages)
    pivot = origin.calls[1]["call_id"]
    for reward in (1.0, 0.0, 1.0, None):
        fork = service.session(replay={"session_id": origin.session_id, "until": pivot})
        fork.ask("q" if reward is not None else "another")
        fork.ask(messages)
        fork.close(reward=0.5 if reward is None else reward)
    text = page(service, f"/ui/sessions/{origin.session_id}")
    assert text.count("worth 0.667 ± 0.33 over 3 forks") == 1
    assert "worth 0.667 ± 0.33 (3 forks)" in text
    assert text.index("worth 0.667 ± 0.33 over 3 forks") > text.index('id="call-2"')
