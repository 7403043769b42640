"""A session's records as the API shows them: calls with their arrays, trajectories with their accounting."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from contract.plugins import PluginError
from proxy.builders import plugins as builders
from proxy.call.budget import cut_call
from proxy.dialects.base import read_model
from proxy.errors import BudgetExhausted, RequestError
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.states import Intent, SessionState
from proxy.transcripts import messages_of
from reconstruct.accounting import DANGLING, Settled, account, settle
from reconstruct.builders import Builder, RowContext
from reconstruct.codec import decode
from reconstruct.errors import DecodeError
from reconstruct.media import as_wire
from reconstruct.records import LOOKAHEAD, REPLAY, Call, Forest, Sampling
from reconstruct.score_columns import lay_scores
from reconstruct.scores import Scores
from reconstruct.trajectory import Accounting, Trajectory, weigh_rows

_decode = msgspec.json.decode

_BLANK: Mapping[str, Any] = dict.fromkeys(
    (
        "branch_reason",
        "role",
        "role_source",
        "dialect",
        "api",
        "model",
        "finish_reason",
        "sampling",
        "messages",
        "reply",
        "session_id",
        "replay",
        "lookahead",
        "engine_seconds",
        "own_seconds",
    )
)


@dataclass(frozen=True, slots=True)
class Built:
    rows: list[Trajectory]
    accounting: Accounting
    settled: Settled
    scores: Mapping[str, Scores]
    """Those that are laid on the rows, by call and scorer."""


def build_rows(
    settings: Settings,
    state: SessionState,
    records: Sequence[bytes],
    intents: Sequence[Intent],
    delivered: Container[str],
    builder: str | None = None,
    logprob_modes: Iterable[str] | None = None,
    scores: Mapping[str, Scores] | None = None,
) -> Built:
    """The session's training rows and what became of every sampled token, with what the settings say is trained.

    `delivered` holds the ids of calls whose answer went out, or may still. Intents without a result are dangling calls: they are
    accounted for with no tokens. `builder` None: the service's. Raises RequestError for one that there is not. `logprob_modes`: of those
    that the settings train, only these. `scores`: of its calls, by their ids.
    """
    build = find_builder(builder or settings.builder)
    calls, damaged = decode_records(records)
    roles, modes = frozenset(settings.train_roles), frozenset(settings.train_logprob_modes)
    if logprob_modes is not None:
        modes = modes.intersection(logprob_modes)
    info = state.info
    settled = settle(
        calls,
        delivered=delivered,
        train_roles=roles,
        train_inferred="inferred_side" in roles,
        logprob_modes=modes,
        session_id=info.session_id,
    )
    rows = build(
        settled,
        RowContext(
            session_id=info.session_id,
            group_id=info.group_id,
            task_id=info.task_id,
            reward=state.reward,
            per_call=state.per_call,
            per_branch=state.per_branch,
            metadata=info.metadata,
            budget_cut=cut_call(info, settled, refused=_is_refused(state)),
            origin=None if info.replay is None else info.replay.session_id,
        ),
    )
    if scores:
        rows = lay_scores(rows, settled.forest, scores)
    finished = {call.call_id for call in calls}
    untold = {intent.call_id: DANGLING for intent in intents if intent.call_id not in finished} | damaged
    return Built(weigh_rows(rows), account(settled, rows, untold), settled, scores or {})


def find_builder(name: str) -> Builder:
    """Raises RequestError naming the known ones."""
    try:
        return builders().load(name)
    except PluginError as error:
        raise RequestError(str(error), param="builder") from error


def _is_refused(state: SessionState) -> bool:
    return state.unserved is not None and state.unserved.code == BudgetExhausted.code


def decode_records(records: Sequence[bytes]) -> tuple[list[Call], dict[str, str]]:
    """The calls, and a name and reason for each record that cannot be read."""
    calls: dict[str, Call] = {}
    damaged = {}
    for number, record in enumerate(records):
        try:
            call = decode(record)
        except DecodeError:
            damaged[f"record-{number}"] = "unreadable_record"
            continue
        calls.setdefault(call.call_id, call)
    return list(calls.values()), damaged


def calls_as_wire(
    records: Sequence[bytes],
    delivered: set[str],
    intents: Sequence[Intent],
    in_flight: Container[str],
    start: CallsCursor,
    limit: int,
    arrays: str,
) -> tuple[list[dict[str, Any]], str | None]:
    """`limit` calls from `start` on in the order they were recorded, then those that are unfinished; the next cursor or None.

    `in_flight` holds the ids of the unfinished calls that are under way; the others are dangling."""
    calls, _ = decode_records(records)
    settled = settle(calls)
    unfinished = [(begun, intent) for begun, intent in _left(intents, calls) if begun > start.unfinished]
    shown = list(_list_recorded(calls[start.recorded : start.recorded + limit], settled, delivered, arrays))
    recorded, room = start.recorded + len(shown), limit - len(shown)
    for _, intent in unfinished[:room]:
        shown.append(_describe_unfinished(intent, in_flight))
    last = unfinished[:room][-1][0] if unfinished[:room] else start.unfinished
    more = recorded < len(calls) or len(unfinished) > room
    return shown, str(CallsCursor(recorded, last)) if more else None


def every_call_as_wire(
    records: Sequence[bytes], delivered: Container[str], intents: Sequence[Intent], in_flight: Container[str]
) -> Iterator[dict[str, Any]]:
    """What all pages of `calls_as_wire` hold, arrays as lists, made one by one: together they are many times the records."""
    calls, _ = decode_records(records)
    yield from _list_recorded(calls, settle(calls), delivered, "list")
    for _, intent in _left(intents, calls):
        yield _describe_unfinished(intent, in_flight)


def _left(intents: Sequence[Intent], calls: Sequence[Call]) -> list[tuple[tuple[float, str], Intent]]:
    """The intents without a call, in the order in which they began."""
    finished = {call.call_id for call in calls}
    return sorted(((each.started_at, each.call_id), each) for each in intents if each.call_id not in finished)


def _list_recorded(calls: Sequence[Call], settled: Settled, delivered: Container[str], arrays: str) -> Iterator[dict[str, Any]]:
    strays = {call.call_id: call for call in settled.stray}
    models = _models(settled)
    for call in calls:
        stray = strays.get(call.call_id)
        known, forest = (stray, Forest()) if stray else (settled.forest.calls[call.call_id], settled.forest)
        yield _call(known, forest, models[call.call_id], call.call_id in delivered, arrays)


def _call(call: Call, forest: Forest, model: str | None, delivered: bool, arrays: str) -> dict[str, Any]:
    node = call.node
    known = call.call_id in forest
    prompt_ids, media = (forest.prompt_ids(call.call_id), forest.media(call.call_id)) if known else (node.delta_ids, node.media)
    packed = arrays == "bytes"
    return {
        "call_id": call.call_id,
        "parent_id": node.parent_id,
        "branch_reason": node.branch_reason,
        "role": call.role,
        "role_source": call.role_source,
        "dialect": call.dialect,
        "api": call.api,
        "model": model,
        "status": call.status,
        "media": as_wire(media),
        "prompt_ids": prompt_ids.tobytes() if packed else prompt_ids.tolist(),
        "completion_ids": node.completion_ids.tobytes() if packed else node.completion_ids.tolist(),
        "logprobs": node.logprobs.tobytes() if packed else node.logprobs.tolist(),
        "logprob_modes": [[span.mode, span.start, span.end] for span in node.modes],
        "weight_versions": [[span.version, span.start, span.end] for span in node.spans],
        "finish_reason": call.finish_reason,
        "stop_reason": call.stop_reason,
        "invalid_tool_call": call.invalid_tool_call,
        "sampling": sampling_as_wire(call.sampling),
        "delivered": delivered,
        "projection": call.projection,
        "control_tokens": call.control_tokens,
        "messages": messages_of(call, forest),
        "reply": _decode(call.reply),
        "engine_tool_call_ids": list(call.engine_tool_call_ids),
        "session_id": call.session_id,
        "replay": call.marks.get(REPLAY),
        "lookahead": call.marks.get(LOOKAHEAD),
        "replica": call.replica,
        "started_at": call.started_at,
        "engine_seconds": call.engine_seconds,
        "own_seconds": call.own_seconds,
    }


def _models(settled: Settled) -> dict[str, str | None]:
    """The model that each call requested, by call id."""
    models: dict[str, str | None] = {}
    # A parent stands before its children, so one pass is enough.
    for call in (*settled.forest.calls.values(), *settled.stray):
        models[call.call_id] = read_model(call) or models.get(call.node.parent_id or "")
    return models


def sampling_as_wire(sampling: Sampling) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "max_tokens": sampling.max_tokens,
        "stop": list(sampling.stop),
        **sampling.extra,
    }


def _describe_unfinished(intent: Intent, in_flight: Container[str]) -> dict[str, Any]:
    """A call that was sent to its engine and whose result has not come: visible, with nothing to train."""
    return {
        **_BLANK,
        "call_id": intent.call_id,
        "parent_id": intent.parent_id,
        "status": "in_flight" if intent.call_id in in_flight else "dangling",
        "prompt_ids": [],
        "completion_ids": [],
        "logprobs": [],
        "logprob_modes": [],
        "weight_versions": [],
        "media": [],
        "invalid_tool_call": False,
        "delivered": False,
        "replica": intent.replica,
        "started_at": intent.started_at,
    }


async def session_rows(
    services: Services, state: SessionState, builder: str | None = None, logprob_modes: Iterable[str] | None = None
) -> Built:
    """`build_rows` on what the store holds of the session, off the event loop. Raises `Unavailable` for a session that only a newer build
    understands."""
    state.info.check_understood()
    session_id = state.info.session_id
    records, intents = await asyncio.gather(
        services.sessions.load_records(session_id), services.sessions.load_intents(session_id)
    )
    heard = await services.sessions.load_heard(session_id)
    scores = await services.scores.load(session_id) if state.scored else None
    in_flight = await services.peers.in_flight(intents) if state.status in ("open", "closing") else ()
    left = [intent for intent in intents if intent.call_id not in in_flight]
    return await asyncio.to_thread(build_rows, services.settings, state, records, left, heard, builder, logprob_modes, scores)


# CallsCursor: a position in a listing of calls that stays valid while further calls are recorded.
#
# Recorded calls are counted, since they are only ever appended. Unfinished calls follow in the order in which they started; one that is
# recorded between two pages appears again, as a record.


@dataclass(frozen=True, slots=True)
class CallsCursor:
    """`recorded` records were shown, and the unfinished calls up to the one of that beginning and id."""

    recorded: int = 0
    unfinished: tuple[float, str] = (-math.inf, "")

    @classmethod
    def parse(cls, text: str | None) -> CallsCursor:
        """Raises RequestError for one that this service never gave."""
        if text is None:
            return cls()
        number, *rest = text.split("_", 2)
        try:
            if not (number.isascii() and number.isdigit()) or len(rest) == 1:
                raise ValueError
            return cls(int(number), (float(rest[0]), rest[1])) if rest else cls(int(number))
        except ValueError:
            raise RequestError(f"cursor: {text!r} is not one that this service gave", param="cursor") from None

    def __str__(self) -> str:
        began, call_id = self.unfinished
        return str(self.recorded) if not call_id else f"{self.recorded}_{began!r}_{call_id}"
