"""Replay: answer a fork's request from the recording of its origin.

A request is matched as its parent is found: by minted ids, then by its history. What a fork has replayed stands in its own records, so
that every process knows it, and a reply is given once: `SessionStore.replay` appends it only where nothing was recorded meanwhile. A
replayed call keeps its id and its session's; nobody counts or trains it here.

Where ids prove replies (echo policy minted), tool results may differ from the record. The reply is then given all the same, but it was
sampled after something else: the fork records its text without ids, and whatever is sampled later is rendered from what really happened.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Any

import msgspec

from proxy.call.cache import SessionCache
from proxy.call.hooks import CallHook
from proxy.call.phases import Admitted, Arrival, Continuation, Emit
from proxy.call.plan import MESSAGES, keep_history
from proxy.call.prompts import PROMPT
from proxy.call.recording import RecordedRequest, Recording, Stored
from proxy.call.session import Session
from proxy.dialects.base import Choice, Delta, HistoryMessage, Reply, Request, read_model
from proxy.dialects.responses_stored import GIVEN, describes_alike
from proxy.engine.pool.pool import EnginePool
from proxy.errors import EngineFailed, ReplayDiverged, Unavailable, VerbatimError
from proxy.metrics import Metrics
from proxy.store.sessions import SessionStore
from proxy.store.sessions import digest as digest_record
from proxy.timeline import CancelScope
from reconstruct.codec import encode
from reconstruct.media import shift
from reconstruct.messages import chain, digest_message
from reconstruct.records import DIFFERS, DIVERGED, MODEL, NO_TOKEN_IDS, PIVOT, REPLAY, Call, Node, pack_ids, pack_logprobs

_decode = msgspec.json.decode
_encode = msgspec.json.Encoder().encode

_TRIES = 50
"""How often a request is matched again because other calls of its session were recorded meanwhile."""


@dataclass(frozen=True, slots=True)
class Match:
    """The recorded request that a request repeats. `exact`: the histories are equal. `again`: its replies were given before; if they were
    delivered, too, it is `Unmatched` with that `mark`."""

    recorded: RecordedRequest
    exact: bool = True
    again: bool = False
    mark: str = ""


@dataclass(frozen=True, slots=True)
class Unmatched:
    """A request that is sampled, and recorded with the REPLAY mark `mark`. `live`: it goes on from what the fork sampled. `differs`: from
    the pivot in tool results."""

    mark: str = ""
    live: bool = False
    differs: bool = False


@dataclass(frozen=True, slots=True)
class Replayed:
    """A fork's request is answered with recorded calls. A `RecordedAnswer`."""

    recording: Recording
    calls: Sequence[Call]

    async def give(self, call: Admitted, emit: Emit) -> Reply:
        reply = build_reply(self.recording, call.request, self.calls)
        pace = self.recording.fork.tokens_per_second
        if pace is not None and call.request.stream:
            await play(call.request, reply, emit, pace, call.scope)
        return reply


@dataclass(frozen=True, slots=True)
class Diverged:
    """A fork's request that was not recorded, and is not to be sampled. A `RecordedAnswer`."""

    error: ReplayDiverged

    async def give(self, call: Admitted, emit: Emit) -> Reply:
        raise self.error


@dataclass(frozen=True, slots=True)
class Live:
    """A fork's request is sampled, and recorded with `marks`."""

    marks: Mapping[str, str]


class ForkHook(CallHook):
    """Answers requests of a fork from its recording."""

    of_session = "replay"

    def __init__(self, replays: Replays) -> None:
        self._replays = replays

    async def admit(self, arrival: Arrival) -> None:
        recalled = await self._replays.recall(arrival)
        if isinstance(recalled, Live):
            arrival.marks = {**arrival.marks, **recalled.marks}
            return
        arrival.recorded = recalled
        if isinstance(recalled, Replayed):
            arrival.call_ids = [call.call_id for call in recalled.calls]
            arrival.started_at = recalled.calls[0].started_at


class Replays:
    def __init__(self, pool: EnginePool, sessions: SessionStore, trees: SessionCache, metrics: Metrics) -> None:
        self._pool = pool
        self._sessions = sessions
        self._trees = trees
        self._metrics = metrics

    async def recall(self, arrival: Arrival) -> Replayed | Diverged | Live:
        """What the recording makes of a fork's request; recorded calls stand in the fork's session when this returns. Raises as the store,
        and Conflict or NotFound for a session that takes no calls."""
        session, request, recording = arrival.draft.session, arrival.request, arrival.draft.session.recording
        if recording is None:
            raise RuntimeError("a session that is no fork replays nothing")
        policy = self._find_policy(recording, request.model)
        find = (MESSAGES if request.prompt is None else PROMPT).find_parent
        for _ in range(_TRIES):
            found = find(session, request, policy)
            match = match_request(session, recording, request, arrival.digest, found)
            if isinstance(match, Match) and match.again and not arrival.is_retry and await self._was_delivered(session, match):
                match = Unmatched(match.mark)
            if isinstance(match, Unmatched):
                # Another process may have recorded what this one continues.
                if match.live or not await self._trees.refresh(session):
                    return self._sample(session, recording, request, found, match)
            elif await self._take(session, recording, request, found, match):
                arrival.draft.keep()
                keep_history(session, found)
                self._trees.weigh(session)
                self._metrics.count_replay("replayed")
                return Replayed(recording, match.recorded.calls)
        raise Unavailable(f"session '{session.info.session_id}' is too busy; try again")

    def _find_policy(self, recording: Recording, model: str) -> str:
        """The policy whose calls the request may continue, whether an engine serves it now or not. A name that is not known is that of
        another policy."""
        policy = recording.find_policy(model)
        if policy is not None:
            return policy
        try:
            return self._pool.find_policy(model)
        except VerbatimError:
            return model

    async def _was_delivered(self, session: Session, match: Match) -> bool:
        return match.recorded.first.call_id in await self._sessions.load_delivered(session.info.session_id)

    async def _take(self, session: Session, recording: Recording, request: Request, found: Continuation, match: Match) -> bool:
        """Whether the recorded calls are in the fork's records now; otherwise others are there that were not known."""
        known = session.known
        calls = match.recorded.calls if match.again else _place_calls(session, recording, request, found, match)
        originals = zip(match.recorded.calls, match.recorded.stored, calls, strict=True)
        entries = {call.call_id: stored if call is original else _store_whole(call) for original, stored, call in originals}
        begun = await self._sessions.replay(
            session.info.session_id, known, entries, time.time(), created_at=session.info.created_at
        )
        self._trees.check_open(session, begun)
        if not begun.accepted:
            session.learn(begun.records, known)
        elif not match.again:
            session.add_calls(calls, None, known + len(calls))
        return begun.accepted

    def _sample(
        self, session: Session, recording: Recording, request: Request, found: Continuation, match: Unmatched
    ) -> Live | Diverged:
        marks = {REPLAY: match.mark} if match.mark else {}
        if match.differs:
            marks[DIFFERS] = "true"
        if match.mark != DIVERGED:
            return Live(marks)
        self._metrics.count_replay("diverged")
        if recording.fork.on_divergence == "live":
            return Live(marks)
        reason = explain_divergence(recording, request, found, self._find_policy(recording, request.model))
        where = f"session '{session.info.session_id}' replays session '{recording.fork.session_id}', where this was not asked"
        return Diverged(ReplayDiverged(f"{where}: {reason}"))


def match_request(
    session: Session, recording: Recording, request: Request, digest: bytes, found: Continuation
) -> Match | Unmatched:
    """What the recording has for a request that continues `found`. Of several recorded requests of one history each is given once, that
    with the same body (`digest`) first."""
    parent_id = found.parent.call_id if found.parent is not None else None
    if found.parent is not None and found.parent.session_id == session.info.session_id:
        return Unmatched(live=True)
    same = [each for each in recording.find(found.chain[-1]) if _continues(session, recording, each, found)]
    alike = same or _find_similar(session, recording, request, found)
    fitting = [each for each in alike if len(each.calls) == request.n and each.first.root_key == found.render_key]
    free = [each for each in fitting if each.replayed and each.first.call_id not in session.forest]
    if free:
        return Match(min(free, key=lambda each: each.first.digest != digest), exact=bool(same))
    if later := [each for each in fitting if not each.replayed]:
        return Unmatched(PIVOT if recording.pivot in later else "", differs=not same)
    mark = DIVERGED if _is_before_pivot(session, recording, parent_id) else ""
    given = [each for each in fitting if not session.forest.children(each.first.call_id)]
    return Match(given[-1], bool(same), again=True, mark=mark) if given else Unmatched(mark)


def _is_before_pivot(session: Session, recording: Recording, parent_id: str | None) -> bool:
    """Whether the recording was to answer: its pivot was not asked yet, or without one, other requests stand in this place."""
    if recording.pivot is None:
        return bool(recording.below(parent_id))
    # A replayed call may be the pivot of the fork that sampled it.
    own = (call for call in session.forest.calls.values() if call.session_id == session.info.session_id)
    return not any(call.marks.get(REPLAY) == PIVOT for call in own)


def _continues(session: Session, recording: Recording, recorded: RecordedRequest, found: Continuation) -> bool:
    """Whether a recorded request of the same history continues the same call, or one that said the very same, as twins do."""
    parent_id = recorded.first.node.parent_id
    if parent_id is None or found.parent is None:
        return parent_id is None
    if parent_id == found.parent.call_id:
        return True
    return parent_id in session.forest and recording.forest.calls[parent_id].reply == found.parent.reply


def _find_similar(session: Session, recording: Recording, request: Request, found: Continuation) -> Sequence[RecordedRequest]:
    """The recorded requests that continue the same call with the same messages but for volatile lines and, where ids prove which reply
    they answer, the contents of tool results."""
    if session.info.echo_policy != "minted":
        return ()
    parent_id = None if found.parent is None else found.parent.call_id
    new = request.history[found.reply_at + 1 :]
    below = recording.below(parent_id)
    return [each for each in below if _reads_alike(session, _decode(each.first.messages), new, of_call=parent_id is not None)]


def _reads_alike(
    session: Session, recorded: Sequence[Mapping[str, Any]], new: Sequence[HistoryMessage], *, of_call: bool
) -> bool:
    if len(recorded) != len(new):
        return False
    return all(
        (of_call and one.get("role") == other.message.get("role") == "tool")
        or digest_message(one).digest == other.digests.digest
        or session.changes_volatile_lines(dict(one), other.message)
        for one, other in zip(recorded, new, strict=True)
    )


def explain_divergence(recording: Recording, request: Request, found: Continuation, policy: str) -> str:
    """What of the request, which `policy` was to answer, was not recorded, for whoever is to prevent it."""
    parent_id = found.parent.call_id if found.parent is not None else None
    recorded = recording.below(parent_id)
    if not recorded:
        return f"nothing continues call {parent_id} there"
    if all(each.first.policy != policy for each in recorded):
        return f"it asks for the model '{request.model}', not for '{recording.find_model(recorded[0].first)}'"
    first = recorded[0].first
    new = request.history[found.reply_at + 1 :]
    pairs = enumerate(zip_longest(_decode(first.messages), new), found.reply_at + 2)
    for number, (one, other) in pairs:
        if one is None or other is None:
            return f"its history has {len(request.history)} messages, that of call {first.call_id} {first.message_count}"
        if digest_message(one).digest != other.digests.digest:
            return f"its message {number} ({other.message.get('role')}) differs from that of call {first.call_id}"
    return (
        f"its messages are those of call {first.call_id}; its tools, parameters or number of choices are not, or it came again"
    )


def _place_calls(session: Session, recording: Recording, request: Request, found: Continuation, match: Match) -> list[Call]:
    """The recorded calls as they stand in the fork's session."""
    placed: list[Call] = []
    for call in match.recorded.calls:
        if not match.exact:
            placed.append(_without_ids(call, request, found))
        else:
            known = session.forest.calls.keys() | {each.call_id for each in placed}
            placed.append(
                call if call.node.base_id is None or call.node.base_id in known else _rebase(session, recording, call)
            )
    return [_as_given(session, call, request) for call in placed]


def _as_given(session: Session, call: Call, request: Request) -> Call:
    """The recorded call as its reply is given here: the dialect, its marks and the name of the model say how that is found again, followed
    and shown. The messages are the same, each as this dialect reads it."""
    asked = read_model(call) or session.model(call.node.parent_id)
    if call.dialect == request.dialect and asked == request.model and describes_alike(call.marks, request.marks):
        return call
    others = {name: mark for name, mark in call.marks.items() if name not in GIVEN}
    named = {} if asked == request.model else {MODEL: request.model}
    messages = _encode(request.messages[call.messages_from :])
    return replace(call, dialect=request.dialect, messages=messages, marks={**others, **named, **request.marks})


def _rebase(session: Session, recording: Recording, call: Call) -> Call:
    """The call with the ids of its prompt on its parent, or whole, where the fork has not replayed what they stand on."""
    parent_id, prompt = call.node.parent_id, recording.forest.prompt_ids(call.call_id)
    extends = parent_id is not None and recording.forest.extends(call.call_id)
    length = recording.forest.full_length(parent_id) if extends and parent_id is not None else 0
    media = [each for each in recording.forest.media(call.call_id) if each.start >= length]
    node = replace(
        call.node,
        base_id=parent_id if extends else None,
        base_length=length,
        delta_ids=prompt[length:],
        details=None,
        media=shift(media, -length),
    )
    return replace(call, node=node)


def _without_ids(call: Call, request: Request, found: Continuation) -> Call:
    """The recorded reply after messages that it was not sampled after."""
    none = pack_ids(())
    parent_id = None if found.parent is None else found.parent.call_id
    begin = found.reply_at + 1
    return replace(
        call,
        node=Node(parent_id, None, None, 0, none, none, pack_logprobs(()), (), ()),
        fingerprint=found.chain[-1],
        reply_fingerprint=chain(found.chain[-1], [digest_message(_decode(call.reply))])[-1],
        root_key=found.render_key,
        message_count=len(request.messages),
        messages_from=begin,
        messages=_encode(request.messages[begin:]),
        preamble=call.preamble if parent_id is None else b"",
        projection=found.projection,
        trainable=False,
        quarantine_reason=NO_TOKEN_IDS,
        marks={**call.marks, DIFFERS: "true"},
    )


def _store_whole(call: Call) -> Stored:
    record = encode(call)
    return digest_record(record), record


# The reply as it was, and its pace.


def build_reply(recording: Recording, request: Request, calls: Sequence[Call]) -> Reply:
    """The recorded reply. Its logprobs name tokens by id, as vLLM writes them: no engine is asked to spell them."""
    first = calls[0]
    choices = [
        Choice(
            index,
            call.call_id,
            _decode(call.reply),
            "length" if call.finish_reason == "abort" else call.finish_reason,
            len(call.node.completion_ids),
            logprobs=_logprobs(call) if request.top_logprobs is not None else None,
            token_ids=call.node.completion_ids.tolist(),
            stop_reason=call.stop_reason,
        )
        for index, call in enumerate(calls)
    ]
    tokens = recording.forest.prompt_length(first.call_id)
    reply = Reply(first.call_id, request.model, int(first.started_at), tokens, choices)
    if request.wants_ids and first.ids_known:
        reply.prompt_ids = recording.forest.prompt_ids(first.call_id).tolist()
    return reply


def _logprobs(call: Call) -> list[dict[str, Any]] | None:
    """None where the engine did not tell the ids or the logprobs of all that it sampled."""
    ids, logprobs = call.node.completion_ids, call.node.logprobs
    if len(ids) != len(logprobs):
        return None
    pairs = zip(ids.tolist(), logprobs.tolist(), strict=True)
    return [{"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []} for token, value in pairs]


async def play(
    request: Request, reply: Reply, emit: Callable[[Sequence[Delta]], None], tokens_per_second: float, scope: CancelScope
) -> None:
    """Emit the reply's text at that pace; returns after as long as its tokens take, or when the call is cut. Logprobs and ids go with the
    text, which is then left to the end."""
    loop = asyncio.get_running_loop()
    began, tokens = loop.time(), 0.0
    with contextlib.suppress(EngineFailed), scope.interruptible():
        for choice in reply.choices:
            kept_whole = request.top_logprobs is not None or request.wants_ids
            pieces: list[Delta | None] = [None] if kept_whole else [*split_text(choice)] or [None]
            for piece in pieces:
                tokens += choice.completion_tokens / len(pieces)
                await asyncio.sleep(began + tokens / tokens_per_second - loop.time())
                if piece is not None:
                    emit([piece])


def split_text(choice: Choice) -> list[Delta]:
    """The choice's reasoning and text in about as many pieces as it has tokens."""
    reasoning, content = choice.message.get("reasoning_content") or "", choice.message.get("content") or ""
    step = max(1, (len(reasoning) + len(content)) // max(1, choice.completion_tokens))
    thought = [Delta(choice.index, reasoning=reasoning[at : at + step]) for at in range(0, len(reasoning), step)]
    return thought + [Delta(choice.index, content[at : at + step]) for at in range(0, len(content), step)]
