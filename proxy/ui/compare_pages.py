"""The page of two sessions side by side, from where their main branches part, with the members of their group to choose from."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby, zip_longest
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from proxy.api.groups import load_group
from proxy.errors import NotFound
from proxy.store.states import SessionState
from proxy.ui.conversation import ShownMessage, list_messages, name_tool_calls, show_message
from proxy.ui.pictures import Rewards
from proxy.ui.rendering import page
from proxy.ui.session_view import ShownSession, summarize
from proxy.ui.shown import Shown, Ui
from reconstruct.messages import canonical_json
from reconstruct.records import Call, shared_length

PAIRS_ON_A_PAGE = 100
SHOWN_CHARACTERS = 4000

Text = Annotated[str, Query(max_length=500)]
Chosen = Annotated[list[str] | None, Query(max_length=2)]


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/compare", comparison, methods=["GET"])
    return router


@dataclass(frozen=True, slots=True)
class Pair:
    """The messages at one position of both conversations; None where one has ended."""

    left: ShownMessage | None
    right: ShownMessage | None
    same: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`left` and `right` are the last calls of the compared branches, which share their first `same_messages` and `same_tokens`. Of the
    `count` positions, `pairs` has those from `start` on."""

    left: Call | None
    right: Call | None
    pairs: Sequence[Pair]
    start: int
    count: int
    same_messages: int
    same_tokens: int

    @property
    def runs(self) -> list[tuple[bool, list[Pair]]]:
        """The pairs in runs of equal and of differing ones."""
        return [(same, list(run)) for same, run in groupby(self.pairs, key=lambda pair: pair.same)]

    @property
    def preceding(self) -> int | None:
        return max(0, self.start - PAIRS_ON_A_PAGE) if self.start else None

    @property
    def following(self) -> int | None:
        end = self.start + len(self.pairs)
        return end if end < self.count else None


async def comparison(
    request: Request,
    ui: Shown,
    left: Text = "",
    right: Text = "",
    group: Text = "",
    chosen: Chosen = None,
    start: Annotated[int | None, Query(ge=0, le=10**9)] = None,
) -> Response:
    """`left` and `right`, or those `chosen`. What is missing of them are members of `group`: the lowest and the highest reward."""
    one, other = (*(name for name in (left, right, *(chosen or ())) if name), "", "")[:2]
    members = await _load_members(ui, group, one)
    one, other = choose_sides(one, other, members)
    views = await asyncio.gather(ui.views.load(one), ui.views.load(other))

    def shown() -> dict[str, Any]:
        compared = compare(*views, start)
        sides = [_side(view, call) for view, call in zip(views, (compared.left, compared.right), strict=True)]
        return {"compared": compared, "sides": sides}

    query = {"left": one, "right": other, "group": group}
    return await page(request, "compare.html", members=members, query=query, live=False, **await asyncio.to_thread(shown))


async def _load_members(ui: Ui, group_id: str, session_id: str) -> Sequence[SessionState]:
    """Those of the group, or of the session's own; the highest reward first, those without one last."""
    if not group_id and session_id:
        state = await ui.services.sessions.load(session_id)
        group_id = (state.info.group_id if state else None) or ""
    group = await load_group(ui.services, group_id) if group_id else None
    states = group.sessions if group else []
    return sorted(states, key=lambda state: (state.reward is None, -(state.reward or 0.0)))


def choose_sides(one: str, other: str, members: Sequence[SessionState]) -> tuple[str, str]:
    """The ids of two sessions: the group's lowest and highest reward; or the one, beside the highest or, if it is that, the lowest. Raises
    NotFound if there are no two."""
    if one and other:
        return one, other
    rewards = Rewards.of((state.info.session_id, state.reward) for state in members)
    lowest, highest = rewards.ends if rewards else ("", "")
    ordered = [one, *([highest, lowest] if one else [lowest, highest]), *(state.info.session_id for state in members)]
    distinct = [*dict.fromkeys(name for name in ordered if name)]
    if len(distinct) < 2:
        raise NotFound("there are no two sessions to compare: name them as left and right")
    return distinct[0], distinct[1]


def _side(view: ShownSession, last: Call | None) -> dict[str, Any]:
    return {"view": view, "state": view.state, "total": summarize(view), "call_id": last.call_id if last else None}


def compare(left: ShownSession, right: ShownSession, start: int | None = None) -> Comparison:
    """From `start` on; None: from the first message that differs."""
    one, other = find_last_call(left), find_last_call(right)
    first, second = (list_messages(call, view.forest) if call else [] for view, call in ((left, one), (right, other)))
    equal = [_are_equal(mine, theirs) for mine, theirs in zip_longest(first, second)]
    same = equal.index(False) if False in equal else len(equal)
    at = min(start, len(equal)) if start is not None else same if same < len(equal) else 0
    end = min(at + PAIRS_ON_A_PAGE, len(equal))
    shown = [_show(messages, at, end) for messages in (first, second)]
    pairs = [Pair(*each) for each in zip(*shown, equal[at:end], strict=True)]
    tokens = shared_length(left.forest.full_ids(one.call_id), right.forest.full_ids(other.call_id)) if one and other else 0
    return Comparison(one, other, pairs, at, len(equal), same, tokens)


def find_last_call(view: ShownSession) -> Call | None:
    """The end of the session's longest branch of the role main, or of any role if there is none."""
    calls = [call for call in view.summaries if call.in_tree]
    calls = [call for call in calls if call.role == "main"] or calls
    if not calls:
        return None
    longest = max(calls, key=lambda call: (call.prompt_tokens + call.sampled_tokens, call.number))
    return view.forest.calls[longest.call_id]


def _show(messages: Sequence[Any], start: int, end: int) -> list[ShownMessage | None]:
    """Those from `start` to `end`, None after the last."""
    names = {name: value for message in messages[:end] for name, value in name_tool_calls(message).items()}
    last = len(messages) - 1
    return [
        show_message(index, messages[index], is_reply=index == last, tool_names=names, limit=SHOWN_CHARACTERS)
        if index <= last
        else None
        for index in range(start, end)
    ]


def _are_equal(left: Any, right: Any) -> bool:
    return left is not None and right is not None and _without_ids(left) == _without_ids(right)


def _without_ids(message: Any) -> bytes:
    """The message without the ids of its tool calls, which differ between any two sessions."""
    if not isinstance(message, dict):
        return canonical_json(message)
    calls = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return canonical_json({**message, "tool_call_id": None, "tool_calls": calls or None})
