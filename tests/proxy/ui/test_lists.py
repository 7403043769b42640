"""Lists that one can work with: filters, orders, bounds that are said, and clear refusals."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from typing import Any

import pytest

from contract.sessions import TokenSums
from proxy.api.filters import parse_query
from proxy.store.connection import StoreConnection
from proxy.store.listing import SessionListing
from proxy.store.sessions import SessionStore
from proxy.store.states import SessionInfo, SessionState
from proxy.ui.causes import group_causes
from proxy.ui.listing import SESSION_COLUMNS, put_in_order, suggest
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

MARKUP = "<b>&\"'"
RUNS = ("base", "lora-8", "lora-64")
BEGAN = 1_750_000_000.0
"""2025-06-15T15:06:40 UTC."""


@pytest.fixture(scope="module", name="service")
def service_with_runs(redis_server: RedisServer) -> Iterator[RunningService]:
    redis_server.flushall()
    asyncio.run(fill(redis_server.url))
    with ScriptedEngine() as engine, RunningService(engine.url, redis_server.url, engine_api="token") as running:
        yield running


async def fill(url: str) -> None:
    """s0 to s11, ten seconds apart, in three runs. s3 failed and s9 did so, too; s10 is open; the rewards of the others are number / 10."""
    connection = StoreConnection(url)
    store = SessionStore(connection)
    for number in range(12):
        name, at = f"s{number}", BEGAN + 10 * number
        label = MARKUP if number == 5 else ("code", "math")[number % 2]
        more: dict[str, Any] = {"group_id": f"g{number // 3}", "group_size": 3, "run": RUNS[number % 3]}
        await store.create(SessionInfo(name, b"", created_at=at, metadata={"label": label}, **more))
        if number in (4, 7):
            await store.set_review(name, "good", "")
        if number == 10:
            continue
        await store.begin_close(name)
        failed = number in (3, 9)
        error = f"harness_crashed: pi was ended by signal 9 after {number} s, see /logs/{number}/agent.err" if failed else None
        await store.close(name, "failed" if failed else "completed", None if failed else number / 10, error, at + 5 + number)
        quarantined = {"not_delivered": 10} if number % 4 == 0 else {"role_side": 5} if number == 7 else {}
        sums = TokenSums(
            sampled_tokens=100 + 7 * (number % 5),
            exported_tokens=100 + 7 * (number % 5) - sum(quarantined.values()),
            quarantined=quarantined,
            complete=not quarantined,
            truncated=number == 6,
            versions={"": (number // 4, number // 4 + 1)} if number != 8 else {"judge": (7, 7)},
        )
        await store.note_accounting(name, sums)
    await connection.close()


def show(service: RunningService, path: str = "/ui", **query: Any) -> str:
    answer = service.request("GET", path, params=query or None)
    assert answer.status_code == 200, answer.text
    return " ".join(answer.text.split())


def found(service: RunningService, **query: Any) -> str:
    """The numbers of the sessions, in the order of the page."""
    return " ".join(re.findall(r'data-item href="/ui/sessions/s(\d+)', show(service, **query)))


@pytest.mark.parametrize(
    ("query", "expected"),
    [
        ({}, "11 10 9 8 7 6 5 4 3 2 1 0"),
        ({"run": "lora-8"}, "10 7 4 1"),
        ({"group": "g1"}, "5 4 3"),
        ({"label": "math"}, "11 9 7 3 1"),
        ({"label": MARKUP}, "5"),
        ({"flag": "good"}, "7 4"),
        ({"status": "failed"}, "9 3"),
        ({"at_least": "0.6", "at_most": "0.8"}, "8 7 6"),
        ({"loss": "truncated"}, "6"),
        ({"loss": "tokens lost"}, "8 4 0"),
        ({"loss": "in quarantine"}, "8 7 4 0"),
        ({"policy": "judge"}, "8"),
        ({"policy": "default", "version": "1"}, "7 6 5 4 3 2 1 0"),
        ({"version": "7"}, "8"),
        ({"after": "2025-06-15T15:07:40", "before": "2025-06-15T15:08:10"}, "8 7 6"),
        ({"after": "2025-06-15T17:07:40+02:00", "label": "code"}, "10 8 6"),
        ({"run": "base", "label": "math", "status": "failed"}, "9 3"),
        ({"q": "SIGNAL 9 after 3"}, "3"),
        ({"q": "s", "task": "nobody's"}, ""),
    ],
    ids=str,
)
def test_page_and_api_filter_sessions_by_all_that_is_known_of_them(
    service: RunningService, query: dict[str, str], expected: str
) -> None:
    assert found(service, **query) == expected
    where = [f"{name}={value}" for name, value in query.items()]
    listed: list[str] = []
    cursor = None
    while len(listed) < 13:
        asked = {"where": where, "limit": 5, **({"cursor": cursor} if cursor else {})}
        answer = service.request("GET", "/sessions", params=asked).json()
        listed += [session["session_id"].removeprefix("s") for session in answer["sessions"]]
        if (cursor := answer["cursor"]) is None:
            break
    assert " ".join(listed) == expected


def test_a_flag_that_becomes_another_is_seen_in_the_list(service: RunningService) -> None:
    """The list took the session from its memory: nothing else had changed of it."""
    for flag, good in (("good", "7 4 2"), ("bad", "7 4"), ("", "7 4")):
        answer = service.request("PUT", "/sessions/s2/review", json={"flag": flag, "note": MARKUP})
        assert answer.status_code == 200 and found(service, flag="good") == good
        assert found(service, flag="bad") == ("2" if flag == "bad" else "")
    assert '<option value="good">' in show(service)


@pytest.mark.parametrize("path", ["/sessions", "/groups"])
@pytest.mark.parametrize(
    ("where", "said"),
    [
        (["colour=red"], "where is 'colour=red'; it is NAME=VALUE, and NAME can be: q, status, "),
        (["status"], "where is 'status'; it is NAME=VALUE"),
        (["sort=-reward"], "where is 'sort=-reward'"),
        (["label=a", "label=b"], "where names label twice"),
        (["status=asleep"], "status is 'asleep'; it can be: "),
        (["at_least=much"], "at_least is 'much', which is no number"),
    ],
)
def test_the_api_refuses_what_no_entry_can_be(service: RunningService, path: str, where: list[str], said: str) -> None:
    answer = service.request("GET", path, params={"where": where})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"]


@pytest.mark.parametrize("column", SESSION_COLUMNS)
def test_sessions_are_ordered_by_each_column_and_what_has_nothing_in_it_comes_last(
    service: RunningService, column: str
) -> None:
    listed = service.request("GET", "/sessions", params={"limit": 100}).json()["sessions"]
    assert len(listed) == 12
    for sort in (column, f"-{column}"):
        shown = found(service, sort=sort).split()
        assert sorted(shown, key=int) == sorted(map(str, range(12)), key=int)
        # s10 is open: it has no reward, no tokens and no versions yet.
        if column in ("tokens", "tokens/s", "lost", "version"):
            assert shown[-1] == "10"
        if column == "reward":
            assert set(shown[-3:]) == {"3", "9", "10"} and shown[0] == ("0" if sort == column else "11")
        if column == "opened":
            assert shown == [str(number) for number in (range(12) if sort == column else range(11, -1, -1))]


def test_lines_keep_their_order_where_the_column_says_nothing_of_it() -> None:
    query = parse_query({"sort": "-reward"}, {"reward": lambda line: line[0]}, ())
    lines = [(1.0, "a"), (None, "b"), (2.0, "c"), (1.0, "d"), (None, "e")]
    assert "".join(name for _, name in put_in_order(lines, query, {"reward": lambda line: line[0]})) == "cadbe"


@pytest.mark.parametrize("path", ["/ui", "/ui/groups"])
@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"sort": "colour"}, "sort is 'colour'; it can be: "),
        ({"status": "asleep"}, "status is 'asleep'; it can be: "),
        ({"loss": "hope"}, "loss is 'hope'; it can be: tokens lost, "),
        ({"in": "dreams"}, "in is 'dreams'; it can be: texts"),
        ({"at_least": "much"}, "at_least is 'much', which is no number"),
        ({"at_most": "nan"}, "at_most is 'nan', which is no number"),
        ({"version": "1.5"}, "version is '1.5', which is no whole number"),
        ({"start": "-1"}, "start is '-1', which is no whole number"),
        ({"after": "yesterday"}, "after is 'yesterday', which is no time since 1970 like 2026-01-31T18:00"),
        ({"q": "x" * 501}, "q has 501 characters; at most 500 are searched"),
        ({"label": MARKUP, "sort": MARKUP}, "sort is "),
    ],
)
def test_a_list_refuses_what_it_cannot_be_asked_for(
    service: RunningService, path: str, given: dict[str, str], said: str
) -> None:
    answer = service.request("GET", path, params=given)
    text = answer.text.replace("&#39;", "'")
    assert answer.status_code == 400 and said in text and MARKUP not in text


def test_an_ordered_list_says_among_how_many_sessions_and_its_pages_have_each_once(
    service: RunningService, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.ui.listing.PAGE", 2)
    monkeypatch.setattr("proxy.ui.listing.LISTED", 7)
    first = show(service, sort="-reward")
    assert "1 to 2 of 7 sessions, among the 7 newest sessions. A list looks at 7 sessions at a time." in first
    seen, path = [], "/ui?sort=-reward"
    for _ in range(9):
        text = show(service, path)
        seen += re.findall(r'data-item href="/ui/sessions/s(\d+)', text)
        following = re.search(r'data-key="next" href="([^"]+)"', text)
        if following is None:
            break
        path = following[1].replace("&amp;", "&")
    assert seen == ["11", "8", "7", "6", "5", "10", "9", "4", "2", "1", "0", "3"]


def test_a_list_reads_again_only_what_has_changed(service: RunningService, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    load = SessionListing.load_many

    async def note(store: SessionListing, names: list[str]) -> list[SessionState | None]:
        read.extend(names)
        return await load(store, names)

    monkeypatch.setattr(SessionListing, "load_many", note)
    found(service, sort="reward")
    read.clear()
    assert found(service, sort="-reward").startswith("11 8")
    assert read == []
    assert service.request("POST", "/sessions/s2/reward", json={"reward": 5.0}).status_code == 200
    assert found(service, sort="-reward").startswith("2 11 8") and read == ["s2"]
    assert service.request("POST", "/sessions/s2/reward", json={"reward": 0.2}).status_code == 200


def test_labels_by_the_thousand_are_offered_a_hundred_at_most(service: RunningService) -> None:
    infos = (SessionInfo(f"m{at}", b"", created_at=BEGAN, metadata={"label": f"{MARKUP}{at}"}) for at in range(1200))
    assert len(suggest(SessionState(info=info) for info in infos).labels) == 100
    shown = show(service, sort="session")
    assert '<option value="&lt;b&gt;&amp;&#34;&#39;">' in shown and MARKUP not in shown


def test_groups_are_filtered_by_their_members_and_ordered(service: RunningService) -> None:
    def groups(**query: Any) -> list[str]:
        return re.findall(r'data-item href="/ui/groups/(g\d+)', show(service, "/ui/groups", **query))

    assert groups() == ["g3", "g2", "g1", "g0"]
    assert groups(q="G2") == ["g2"]
    assert groups(loss="truncated") == ["g2"]
    assert groups(at_least="1") == ["g3"]
    assert groups(sort="mean") == ["g0", "g1", "g2", "g3"]
    assert groups(sort="-lost", loss="tokens lost") == ["g2", "g1", "g0"]
    assert groups(flag="good") == ["g2", "g1"]
    for where, expected in (("flag=good", "g2 g1"), ("run=lora-8", "g3 g2 g1 g0"), ("q=G2", "g2"), ("status=leased", "")):
        listed = service.request("GET", "/groups", params={"where": where}).json()["groups"]
        assert " ".join(group["group_id"] for group in listed) == expected
    assert groups(status="waiting") == ["g3", "g2", "g1", "g0"] and groups(status="leased") == []


def test_equal_failures_are_one_cause(service: RunningService) -> None:
    text = show(service, status="failed")
    assert "1 cause of failure" in text
    assert '<td class="n" data-label="failures">2</td>' in text and "All that say “harness_crashed”" in text
    assert found(service, q="harness_crashed") == "9 3"


def test_messages_that_differ_in_numbers_ids_and_paths_have_one_cause() -> None:
    failures = [
        ("timeout: node n-17 lost task-3.1 after 60.5 s, see /var/logs/17/agent.err", "a"),
        ("timeout: node n-2 lost task-44.0 after 7 s, see /tmp/x/y.err", "b"),
        ("timeout: nobody came", "c"),
        ("", "d"),
        ("bad digest deadbeefcafe at 0x7f01", "e"),
        ("bad digest 0123456789ab at 0xAB", "f"),
    ]
    assert [(cause.count, list(cause.names), cause.kind) for cause in group_causes(failures)] == [
        (2, ["a", "b"], "timeout"),
        (2, ["e", "f"], "bad digest deadbeefcafe at 0x7f01"),
        (1, ["c"], "timeout"),
    ]
