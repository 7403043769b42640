"""The pages of groups: the list, and one group with its members, its rewards and where its delivery stands."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Annotated

from fastapi import APIRouter, Query, Request, Response
from fastapi.routing import APIRoute

from proxy.api.closing import RUN_ENDED
from proxy.api.groups import GroupView, describe_groups, explain, load_group, newest_groups
from proxy.errors import NotFound
from proxy.store.groups import GroupRound
from proxy.store.run import CAUSES
from proxy.store.states import SessionState
from proxy.ui.listing import measure_lost
from proxy.ui.pictures import Rewards
from proxy.ui.rendering import format_time, page
from proxy.ui.shown import Shown

Text = Annotated[str, Query(max_length=500)]

STATE_WORDS: Mapping[str, str] = {
    "none": "waiting",
    "announced": "closing",
    "filling": "waiting",
    "ready": "ready",
    "leased": "leased",
    "acked": "acknowledged",
    "dropped": "dropped",
    "dead": "dead",
}
"""What the store calls a group's delivery, in the words of these pages."""


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/groups", groups, methods=["GET"])
    router.add_api_route("/groups/{group_id:path}", group, methods=["GET"])
    return router


async def groups(request: Request, ui: Shown, q: Text = "") -> Response:
    found = [(group, rewards_of(group.sessions)) for group in await newest_groups(ui.services, q.strip())]
    return await page(request, "groups.html", groups=found, query={"q": q}, live=True)


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
    return (
        f"It {waiting}. {explain_round(newest, patience_seconds)}"
        if newest.status == "filling"
        else explain_round(newest, patience_seconds)
    )


def explain_round(each: GroupRound, patience_seconds: float) -> str:
    """What the round waits for, or what became of it."""
    if each.status == "filling":
        until = (
            f" It is given up at {format_time(each.since + patience_seconds)} unless one comes."
            if patience_seconds and each.since
            else ""
        )
        return f"{each.usable} of {each.size} members are usable.{until}"
    if each.status == "ready":
        return _explain_ready(each)
    if each.status == "leased":
        until = f" until {format_time(each.expires_at)}" if each.expires_at else ""
        return f"{each.consumer or 'A trainer'} leases it{until}; delivery {each.deliveries}."
    if each.status == "acked":
        return "A trainer acknowledged it."
    cause = CAUSES.get(each.cause, "It was stored by another version, without a cause.")
    return f"{cause} {each.story}" if each.story else cause


def _explain_ready(each: GroupRound) -> str:
    again = f" It was delivered {each.deliveries} times before: {each.story}." if each.deliveries else ""
    if each.passed:
        return f"It waits for a lease that takes tokens of weight version {each.oldest_version}: the last one wanted newer ones.{again}"
    before = f"{each.before} ready groups are leased before it." if each.before else "It is the next to be leased."
    return f"It waits for a trainer. {before}{again}"
