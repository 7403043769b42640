"""What must be true after any number of crashes, held against those who cannot err: the engine's own notes of what it sampled, the
harnesses' of what they were told, and the trainers' journal.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import numpy as np

from reconstruct.accounting import settle
from reconstruct.codec import decode
from reconstruct.trajectory import Trajectory
from reconstruct.verification import verify
from tests.support.crashes.agents import GROUP_SIZE, Told
from tests.support.crashes.trainer import digest
from tests.support.engine.scripted_engine import Generation, logprobs_of
from tests.support.service.redis_server import Store
from tests.support.service.verbatim_process import ADMIN
from trainer_client.wire import decode_trajectory

PAGE = 3
"""Calls to a page: small, so that cursors are used."""
TRAINED = ("main", "subagent")


@dataclass
class Kept:
    """One session as the service shows it afterwards."""

    session_id: str
    status: str
    calls: list[dict[str, Any]]
    rows: list[Trajectory]
    accounting: dict[str, Any]


@dataclass
class Checked:
    """Figures of one check; `losses` and `duplicates` are told, not counted, and the check fails when there is one."""

    replies: int = 0
    tokens: int = 0
    calls: int = 0
    sessions: int = 0
    dangling: int = 0
    quarantined: Counter[str] = field(default_factory=Counter)
    groups: int = 0
    deliveries: int = 0
    redelivered: int = 0
    acknowledged_unheard: int = 0
    """Acknowledgements whose answer the trainer did not live to read, and which had happened."""


def check_all(told: Told, made: Sequence[Generation], url: str, redis_url: str, journal: Path) -> Checked:
    """Every promise, after the last group was acknowledged. Raises AssertionError with the first that is broken."""
    assert told.unexpected == [], told.unexpected[:10]
    with httpx.Client(base_url=url, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=60) as control:
        kept = {session_id: _kept(control, session_id) for session_id in told.sessions}
        steps = [json.loads(line) for line in journal.read_text().splitlines()]
        checked = Checked(sessions=len(kept), replies=len(told.replies))
        _check_engine(kept, made, checked)
        _check_replies(told, kept)
        _check_accounting(kept, checked)
        _check_attempts(told, kept)
        _check_delivery(told, kept, steps, checked)
    asyncio.run(_verify(redis_url, kept.values()))
    return checked


def _kept(control: httpx.Client, session_id: str) -> Kept:
    state = _get(control, f"/sessions/{session_id}")
    calls: list[dict[str, Any]] = []
    cursor = ""
    while cursor is not None:
        page = _get(control, f"/sessions/{session_id}/calls?limit={PAGE}" + (f"&cursor={cursor}" if cursor else ""))
        calls += page["calls"]
        cursor = page["cursor"]
    built = _get(control, f"/sessions/{session_id}/trajectories")
    rows = [decode_trajectory(row) for row in built["trajectories"]]
    return Kept(session_id, state["status"], calls, rows, built["accounting"])


def _get(control: httpx.Client, path: str) -> Any:
    answer = control.get(path)
    assert answer.status_code == 200, f"{path}: {answer.status_code} {answer.text}"
    return answer.json()


def _check_engine(kept: Mapping[str, Kept], made: Sequence[Generation], checked: Checked) -> None:
    """Every record holds what the engine was given and what it sampled; what it sampled is recorded or known to be lost."""
    sampled = {generation.request_id.removeprefix("generate-tokens-"): generation for generation in made}
    calls = {call["call_id"]: call for session in kept.values() for call in session.calls}
    assert len(calls) == sum(len(session.calls) for session in kept.values()), "a call is listed twice"
    for call_id, generation in sampled.items():
        assert call_id in calls or not generation.sampled[0], f"{call_id} was sampled and is not to be seen"
    for call_id, call in calls.items():
        if call["status"] == "dangling":
            checked.dangling += 1
        else:
            _check_record(call, sampled[call_id])
    checked.calls = len(calls)
    checked.tokens = sum(len(call["completion_ids"]) for call in calls.values())


def _check_record(call: dict[str, Any], generation: Generation) -> None:
    said, prompt_ids = generation.sampled[0], generation.prompt_ids
    ids, whole = call["completion_ids"], call["finish_reason"] != "abort"
    # One that ends while it is interpreted, and whose harness has gone by then, keeps its tokens and is not trained (_check_accounting).
    assert call["status"] in ("finished", "failed") or not whole, f"a whole reply is recorded as {call['status']}: {call}"
    assert call["prompt_ids"] == prompt_ids, f"call {call['call_id']} has another prompt"
    assert ids == (said if whole else said[: len(ids)]), f"call {call['call_id']} has other tokens"
    assert np.array_equal(np.array(call["logprobs"], np.float32), np.array(logprobs_of(prompt_ids, ids), np.float32))


def _check_replies(told: Told, kept: Mapping[str, Kept]) -> None:
    """What a harness read to its end is in the store, and the next call continues exactly it."""
    calls = {call["call_id"]: call for session in kept.values() for call in session.calls}
    for reply in told.replies:
        call = calls.get(reply.call_id)
        assert call is not None, f"the reply {reply.call_id} of session {reply.session_id} is lost"
        assert call["status"] == "finished", f"the reply {reply.call_id} was told whole, and is {call['status']}"
        assert _essence(call["reply"]) == _essence(reply.message), f"the reply {reply.call_id} is recorded otherwise"
        _check_continues(calls, call, reply.parent_id)


def _check_continues(calls: Mapping[str, dict[str, Any]], call: dict[str, Any], parent_id: str | None) -> None:
    """`call` goes on from exactly the reply that the harness answers. It is one of several only when it was asked again."""
    name, reason = call["call_id"], call["branch_reason"]
    assert call["parent_id"] == parent_id, f"call {name} continues {call['parent_id']} and not {parent_id}"
    if parent_id is not None:
        before = calls[parent_id]["prompt_ids"] + calls[parent_id]["completion_ids"]
        assert call["prompt_ids"][: len(before)] == before, f"call {name} has another context than its parent"
    assert reason in (None, "repeated"), f"call {name} branched: {reason}"
    if reason == "repeated":
        twins = [other for other in calls.values() if other["prompt_ids"] == call["prompt_ids"]]
        assert len(twins) > 1, f"call {name} repeats no other"


def _essence(message: Mapping[str, Any]) -> Any:
    calls = [(call["id"], call["function"]) for call in message.get("tool_calls") or ()]
    return message.get("content") or "", message.get("reasoning_content") or "", calls


def _check_accounting(kept: Mapping[str, Kept], checked: Checked) -> None:
    for session in kept.values():
        accounting = session.accounting
        refused = {item["call_id"]: item for item in accounting["quarantined"]}
        assert len(refused) == len(accounting["quarantined"])
        sampled = {call["call_id"]: len(call["completion_ids"]) for call in session.calls}
        exported = sum(int(row.loss_mask.sum()) for row in session.rows)
        assert accounting["exported_tokens"] == exported
        assert accounting["sampled_tokens"] == sum(sampled.values())
        assert accounting["sampled_tokens"] == exported + sum(item["tokens"] for item in refused.values())
        for call in session.calls:
            assert call["status"] != "in_flight", f"call {call['call_id']} of a closed session is under way"
            if call["status"] == "dangling":
                assert refused[call["call_id"]]["reason"] == "dangling", f"call {call['call_id']} is not quarantined"
            elif call["status"] == "failed" and call["finish_reason"] != "abort":
                assert refused[call["call_id"]]["reason"] == "not_delivered", (
                    f"call {call['call_id']} was told to nobody: {call}"
                )
                assert not call["delivered"], f"call {call['call_id']} failed, and was told: {call}"
        checked.quarantined.update(item["reason"] for item in refused.values())


def _check_attempts(told: Told, kept: Mapping[str, Kept]) -> None:
    """What a harness read is trained, or its session is incomplete; what nobody read and nothing continues leaves it complete."""
    read = {reply.call_id for reply in told.replies}
    for session in kept.values():
        refused = {item["call_id"]: item["reason"] for item in session.accounting["quarantined"]}
        trained = {call_id for row in session.rows if row.loss_mask.any() for call_id in row.call_ids}
        for call in session.calls:
            call_id, reason = call["call_id"], refused.get(call["call_id"])
            if call_id in read:
                assert call["delivered"] and reason != "not_delivered", f"call {call_id} was read whole, and is {reason}"
                assert reason or call_id in trained or not call["completion_ids"], f"call {call_id} is in no row"
        lost = {reason for reason in refused.values() if reason != "not_delivered"}
        assert session.accounting["complete"] == (not lost), f"session {session.session_id} is told as {session.accounting}"


def _check_delivery(told: Told, kept: Mapping[str, Kept], steps: Sequence[dict[str, Any]], checked: Checked) -> None:
    """Whole groups with the rows that the sessions have, until one is acknowledged; then never again."""
    acknowledged: dict[str, str] = {}
    seen: Counter[str] = Counter()
    heard = {step["lease"] for step in steps if step["what"] == "acknowledged"}
    confirmed = {step["lease"] for step in steps if step["what"] == "confirmed"} - heard
    for step in steps:
        if step["what"] == "leased":
            for group_id, rows in step["groups"].items():
                assert group_id not in acknowledged, f"group {group_id} came again after {acknowledged[group_id]}"
                assert rows == _expected_rows(told, kept, group_id), f"group {group_id} was not delivered as it is"
                seen[group_id] += 1
        # An acknowledgement that nobody lived to hear of can only have happened while its lease held the group.
        if step["what"] == "acknowledged" or (step["what"] == "acknowledging" and step["lease"] in confirmed):
            for group_id in step["groups"]:
                assert group_id not in acknowledged, f"group {group_id} was acknowledged twice"
                acknowledged[group_id] = step["lease"]
    missing = set(told.groups) - set(acknowledged)
    assert not missing, f"{len(missing)} groups never came, among them {sorted(missing)[:3]}"
    assert set(acknowledged) <= set(told.groups), "a group was delivered that no harness finished"
    checked.groups = len(acknowledged)
    checked.deliveries = seen.total()
    checked.acknowledged_unheard = len(confirmed)
    checked.redelivered = sum(count - 1 for count in seen.values())


def _expected_rows(told: Told, kept: Mapping[str, Kept], group_id: str) -> dict[str, str]:
    members = told.groups[group_id]
    assert len(members) == (1 if group_id.endswith("-forgotten") else GROUP_SIZE)
    rows = [row for session_id in members for row in kept[session_id].rows if row.loss_mask.any()]
    return {row.trajectory_id: digest(row) for row in rows}


async def _verify(redis_url: str, kept: Iterable[Kept]) -> None:
    """The promises on rows, held by `reconstruct` against the records as they lie in the store."""
    store = Store.at(redis_url)
    for session in kept:
        calls = [decode(record) for record in await store.sessions.load_records(session.session_id)]
        delivered = await store.sessions.load_delivered(session.session_id)
        settled = settle(calls, delivered=delivered, train_roles=TRAINED)
        assert not settled.stray, f"session {session.session_id} has calls without their parents"
        verify(settled.forest, settled.refused, session.rows)
    await store.connection.close()
