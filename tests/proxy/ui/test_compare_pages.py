"""Two sessions side by side: any two of a group of any size, from where they part."""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

import pytest

from proxy.errors import NotFound
from proxy.store.states import SessionInfo, SessionState
from proxy.ui.compare_pages import PAIRS_ON_A_PAGE, choose_sides
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import RunningService
from tests.support.service.ui_sessions import GROUP, group_of_four, imported, shown_engine, shown_service
from tests.support.sessions.calls import Talk

__all__ = ["shown_engine", "shown_service"]
SHARED = 3 * PAIRS_ON_A_PAGE


def long_sessions(service: RunningService, engine: ScriptedEngine) -> None:
    """Two of which the first 300 messages are the same, and the following 150 differ but for one."""
    for name in ("left", "right"):
        talk = Talk(name)
        texts = [f"shared {number}" for number in range(SHARED)]
        texts += [f"{name} {number}" if number != 7 else "agreed" for number in range(150)]
        messages = json.dumps([{"role": "user", "content": text} for text in texts]).encode()
        reply = json.dumps({"role": "assistant", "content": f"{name} is done"}).encode()
        talk.say("c1", [5, 6, 7], [8], fields={"messages": messages, "message_count": len(texts), "reply": reply})
        imported(service, talk, reward=0.5)


SHOWN = (group_of_four, long_sessions)


def compared(service: RunningService, **query: Any) -> str:
    answer = service.request("GET", "/ui/compare", params=query)
    assert answer.status_code == 200, answer.text
    return answer.text


def sides(text: str) -> list[str]:
    return re.findall(r'<h2><a [^>]*href="/ui/sessions/([^"]+)"', text)


def test_a_group_leads_to_its_lowest_reward_beside_its_highest(service: RunningService) -> None:
    listed = service.request("GET", f"/ui/groups/{quote(GROUP, safe='')}").text
    assert 'href="/ui/compare?left=poor&amp;right=rich"' in listed
    assert sides(compared(service, group=GROUP)) == ["poor", "rich"]
    assert 'href="/ui/compare?left=fair"' in service.request("GET", "/ui/sessions/fair").text
    assert "has ended" in compared(service, left="poor", right="rich")
    assert "the same in all of their" in compared(service, left="rich", right="rich")
    assert "Neither session has a recorded call." in compared(service, left="failed", right="failed")


@pytest.mark.parametrize(
    ("query", "wanted"),
    [
        ({"chosen": ["fair", "failed"]}, ["fair", "failed"]),
        ({"chosen": "fair", "group": GROUP}, ["fair", "rich"]),
        ({"left": "rich"}, ["rich", "poor"]),
        ({"left": "fair"}, ["fair", "rich"]),
    ],
)
def test_what_nobody_chose_is_the_highest_reward_or_the_lowest(
    service: RunningService, query: dict[str, Any], wanted: list[str]
) -> None:
    assert sides(compared(service, **query)) == wanted


def test_every_member_of_the_group_can_be_chosen_on_either_side(service: RunningService) -> None:
    text = compared(service, left="poor", right="rich")
    for chosen, select in zip(("poor", "rich"), re.findall(r"<select.*?</select>", text, re.S), strict=True):
        options = re.findall(r'<option value="([^"]+)"( selected)?>([^<]*)<', select)
        assert [shown for _, _, shown in options] == ["1 · rich", "0.5 · fair", "0 · poor", "– · failed · failed"]
        assert [value for value, selected, _ in options if selected] == [chosen]


def test_two_sessions_without_a_reward_are_the_first_two_and_one_alone_is_not_compared() -> None:
    states = [
        SessionState(SessionInfo(name, b"", 1.0), status="completed", calls=1, closed_at=9.0, updated_at=9.0) for name in "abc"
    ]
    assert choose_sides("", "", states) == ("a", "b")
    assert choose_sides("a", "", states) == ("a", "b")
    for members in ([], states[:1]):
        with pytest.raises(NotFound, match="no two sessions"):
            choose_sides("", "", members)


def test_a_comparison_begins_where_the_sessions_part_and_is_turned_page_by_page(service: RunningService) -> None:
    """Once the first 400 messages were shown, shared ones too: of long sessions, nothing that differed."""
    query = {"left": "left", "right": "right"}
    text = compared(service, **query)
    assert f"the same in {SHARED} messages" in text and f"shared {SHARED - 1}" not in text
    assert "left 0<" in text and "right 99<" in text and "left 100<" not in text and text.count("agreed") == 1
    shared = compared(service, **query, start=SHARED - PAIRS_ON_A_PAGE)
    assert "shared 200<" in shared and "shared 299<" in shared and "left 0<" not in shared
    last = compared(service, **query, start=SHARED + PAIRS_ON_A_PAGE)
    assert "left 149<" in last and "right is done" in last and "Later messages" not in last
    for start in (SHARED - PAIRS_ON_A_PAGE, SHARED + PAIRS_ON_A_PAGE):
        assert f"start={start}" in text
    assert "No message is this far on." in compared(service, **query, start=9999)
