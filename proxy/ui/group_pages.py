"""The pages of groups: the list, and one group with its members, its rewards and where its delivery stands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from proxy.api.closing import RUN_ENDED, group_name
from proxy.api.filters import Columns, ListQuery, measure_lost, parse_query
from proxy.api.groups import LETTERS, GroupView, collect_groups, describe_groups, explain, load_group
from proxy.errors import NotFound
from proxy.store.groups import GroupRound
from proxy.store.run import CAUSES
from proxy.store.states import SessionState
from proxy.ui.causes import Cause, group_causes
from proxy.ui.concepts import STATE_WORDS
from proxy.ui.listing import (
    Listing,
    cut_page,
    load_choices,
    load_window,
    put_in_order,
)
from proxy.ui.pictures import Rewards
from proxy.ui.rendering import format_time, page
from proxy.ui.shown import Shown, Ui

DESCRIBED_AT_ONCE = 50
"""Groups that one script looks at."""

WORDS = tuple(dict.fromkeys(STATE_WORDS.values()))


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/groups", groups, methods=["GET"])
    router.add_api_route("/groups/{group_id:path}", group, methods=["GET"])
    return router


async def groups(request: Request, ui: Shown) -> Response:
    query = parse_query(request.query_params, GROUP_COLUMNS, WORDS)
    found, choices = await asyncio.gather(list_groups(ui, query), load_choices(ui))
    shown: dict[str, Any] = {"columns": GROUP_COLUMNS, "statuses": WORDS}
    return await page(request, "groups.html", found=found, query=query, live=not query.cursor, **shown, **choices)


async def group(request: Request, ui: Shown, group_id: str) -> Response:
    found = await load_group(ui.services, group_id)
    if found is None:
        raise NotFound(f"there is no group {group_id}")
    described, rounds = await asyncio.gather(
        describe_groups(ui.services, [found]), ui.services.delivery.load_rounds(f"g:{group_id}")
    )
    ((shown, standings),) = described
    patience = ui.services.settings.group.timeout_seconds
    return await page(
        request,
        "group.html",
        group=found,
        state=STATE_WORDS[shown["delivery"]],
        why=explain_rounds(found, rounds, patience),
        rounds=[(each, STATE_WORDS[each.status], explain_round(each, patience)) for each in rounds],
        members=[(state, STATE_WORDS[each]) for state, each in zip(found.sessions, standings, strict=True)],
        rewards=rewards_of(found.sessions),
        advantages=measure_advantages(found.sessions),
        lost=measure_lost,
        runs=list(dict.fromkeys(state.info.run for state in found.sessions)),
        tasks=list(dict.fromkeys(state.info.task_id for state in found.sessions if "rollout" in state.info.metadata)),
        live=shown["delivery"] in ("none", "announced", "filling", "ready", "leased"),
    )


@dataclass(frozen=True, slots=True)
class GroupLine:
    """A group in a list. `word`: where it is; `reason`: why."""

    group: GroupView
    rewards: Rewards | None
    word: str
    reason: str

    @property
    def runs(self) -> list[str]:
        return list(dict.fromkeys(state.info.run for state in self.group.sessions))

    @property
    def tokens(self) -> int:
        """Sampled by its closed members."""
        return sum(state.accounting.sampled_tokens for state in self.group.sessions if state.accounting)

    @property
    def lost(self) -> int:
        return sum(measure_lost(state.accounting) for state in self.group.sessions if state.accounting)


GROUP_COLUMNS: Columns[GroupLine] = {
    "group": lambda line: line.group.group_id,
    "state": lambda line: line.word,
    "run": lambda line: line.runs[0],
    "closed": lambda line: line.group.closed,
    "failed": lambda line: line.group.failed,
    "mean": lambda line: line.rewards and line.rewards.mean,
    "spread": lambda line: line.rewards and line.rewards.spread,
    "tokens": lambda line: line.tokens,
    "lost": lambda line: line.lost,
    "newest": lambda line: line.group.newest,
}


async def list_groups(ui: Ui, query: ListQuery) -> Listing[GroupLine]:
    """The groups of a window of sessions, the one with the newest session first. One with a member that the query accepts is listed."""
    window = await load_window(ui.catalogue, query)
    views = collect_groups(window.sessions, query)
    if query.sort == "state" or query.status:
        lines = [line for line in await describe(ui, views) if query.status in ("", line.word)]
        found = cut_page(put_in_order(lines, query, GROUP_COLUMNS), query, window)
        return replace(found, causes=await group_letters(ui) if query.status == "dead" else ())
    unplaced = [GroupLine(view, rewards_of(view.sessions), "", "") for view in views]
    found = cut_page(put_in_order(unplaced, query, GROUP_COLUMNS), query, window)
    return replace(found, lines=await describe(ui, [line.group for line in found.lines]))


async def group_letters(ui: Ui) -> list[Cause]:
    """Why the newest dead letters died."""
    letters, _ = await ui.services.delivery.dead_letters(LETTERS)
    return group_causes((letter.reason, group_name(letter.group_id)) for letter in letters)


async def describe(ui: Ui, views: Sequence[GroupView]) -> list[GroupLine]:
    """With where each group is."""
    told: list[tuple[dict[str, Any], list[str]]] = []
    for first in range(0, len(views), DESCRIBED_AT_ONCE):
        told += await describe_groups(ui.services, views[first : first + DESCRIBED_AT_ONCE])
    return [
        GroupLine(view, rewards_of(view.sessions), STATE_WORDS[shown["delivery"]], shown["reason"])
        for view, (shown, _) in zip(views, told, strict=True)
    ]


def rewards_of(sessions: Sequence[SessionState]) -> Rewards | None:
    return Rewards.of((state.info.session_id, state.reward) for state in sessions)


def measure_advantages(sessions: Sequence[SessionState]) -> Mapping[str, tuple[float, float]]:
    """By session, of those that a trainer could compare: the reward minus the group's mean, and that over the deviation."""
    usable = [state for state in sessions if state.status in RUN_ENDED]
    rewards = rewards_of(usable)
    return {} if rewards is None else rewards.advantages()


def explain_rounds(group: GroupView, rounds: Sequence[GroupRound], patience_seconds: float) -> str:
    """Why no trainer has the group, or what became of it, in a sentence."""
    waiting = explain(group, "filling", None)
    if not rounds:
        return f"No member has entered the group yet; it {waiting}."
    newest = rounds[0]
    if newest.status == "filling":
        return f"It {waiting}.{_tell_patience(newest, patience_seconds)}"
    return explain_round(newest, patience_seconds)


def explain_round(each: GroupRound, patience_seconds: float) -> str:
    """What the round waits for, or what became of it."""
    if each.status == "filling":
        return f"{each.usable} of {each.size} members are usable.{_tell_patience(each, patience_seconds)}"
    if each.status == "ready":
        return _explain_ready(each)
    if each.status == "leased":
        until = f" until {format_time(each.expires_at)}" if each.expires_at else ""
        return f"{each.consumer or 'A trainer'} leases it{until}; delivery {each.deliveries}."
    if each.status == "acked":
        return "A trainer acknowledged it."
    cause = CAUSES.get(each.cause, "It was stored by another version, without a cause.")
    return f"{cause} {each.story}" if each.story else cause


def _tell_patience(each: GroupRound, patience_seconds: float) -> str:
    """When a round that waits for members is given up; "" if never."""
    if not (patience_seconds and each.since):
        return ""
    return f" It is given up at {format_time(each.since + patience_seconds)} unless one comes."


def _explain_ready(each: GroupRound) -> str:
    again = f" It was delivered {each.deliveries} times before: {each.story}." if each.deliveries else ""
    if each.passed:
        return f"It waits for a lease that takes tokens of weight version {each.oldest_version}: the last one wanted newer ones.{again}"
    before = f"{each.before} ready groups are leased before it." if each.before else "It is the next to be leased."
    return f"It waits for a trainer. {before}{again}"
