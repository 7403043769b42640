"""The records: the tokens that one call gave to the model and those it sampled; and the forest that those of a session form.

A session is a forest of nodes. A node does not hold its whole prompt; it names a *base* it shares a prefix with:

    prompt_ids(node) == (prompt_ids(base) + completion_ids(base))[:base_length] + delta_ids

so storage grows with the new tokens, not with the history. `parent_id` says what the call *means* (which call it
continues), `base_id` only where its first ids are stored. A node *extends* its parent when the base is the parent and
`base_length` is all of it: only then does one training row run through both.

Arrays are packed once: ids int32, logprobs float32, both read-only and in the engine's order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from reconstruct.details import CallDetails, of_one_shape
from reconstruct.errors import IdOutOfRange, LengthMismatch, MissingLogprob, SpanError, UnknownParent
from reconstruct.media import Media, overlapping, shift
from reconstruct.messages import read_tool_call_id
from reconstruct.spans import ModeSpan, Span

RAW, PROCESSED, MASKED, UNKNOWN_MODE, LOGITS = "raw", "processed", "masked", "unknown", "logits"
"""What a logprob was taken from. RAW: log_softmax of the model's logits, so it recomputes. PROCESSED: after temperature, truncation and
processors. MASKED: tokens were masked before the number was taken, as a grammar does; it does not recompute. UNKNOWN_MODE: nothing says
that it is one of these. LOGITS: the number is no logprob at all, and is never trained."""

LOGPROB_MODES = (RAW, PROCESSED, MASKED, UNKNOWN_MODE)
"""The modes that may be trained."""

NO_TOKEN_IDS = "no_token_ids"
"""The quarantine reason of a call whose engine did not report the ids of its prompt and reply."""

DECLARED, RULE, INFERRED = "declared", "rule", "inferred"
"""The source of a call's role: the harness or its definition, a rule of the operator, or inference."""

CONTROL_TOKENS = "control_tokens"
"""The mark of a call whose new messages contain control tokens in their text; also a key of a row's metadata."""

BASE_VERSIONS = "base_versions"
"""The mark of a call that an adapter sampled: the versions of the base model under it, a JSON list of [version, start, end] over the
sampled tokens; also a key of a row's metadata, there in the row's positions."""

INVALID_TOOL_CALL = "invalid_tool_call"
"""The mark of a call whose reply has a tool call that is none, or not whole: see proxy/call/record.py."""

REPLAY, PIVOT, DIVERGED = "replay", "pivot", "diverged"
"""The mark of calls that a fork sampled where others were recorded, and its values: PIVOT, the request from which the fork samples;
DIVERGED, one that was not recorded."""

DIFFERS = "replay_differs"
"""The mark of a fork's calls whose tool results, or those before them, differ from the record. What was replayed has no known ids."""

LOOKAHEAD, CHOSEN, NOT_CHOSEN = "lookahead", "chosen", "not_chosen"
"""The mark of the candidates of a lookahead, and its values. NOT_CHOSEN is the quarantine reason, too: no harness saw such a reply, so
nothing continues it."""

MODEL = "model"
"""The mark of a call that asked for its policy by another name than its parent: that name."""

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]


def pack_ids(ids: Any) -> Ids:
    """`ids` as a read-only int32 array of shape (n,). Raises IdOutOfRange for an id beyond int32."""
    if type(ids) is list:
        # `struct` packs a list of integers in half of numpy's time and accepts nothing else.
        try:
            return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), dtype=np.int32)
        except struct.error as error:
            raise IdOutOfRange(f"a token id is no integer of 32 bits: {error}") from error
    try:
        array = np.array(ids, dtype=np.int32).reshape(-1)
    except OverflowError as error:
        raise IdOutOfRange(f"a token id does not fit 32 bits: {error}") from error
    array.flags.writeable = False
    return array


def pack_logprobs(logprobs: Any) -> Logprobs:
    """`logprobs` as a read-only float32 array of shape (n,); None becomes NaN, which `Node.check` rejects."""
    if type(logprobs) is list:
        try:
            return np.frombuffer(struct.pack(f"={len(logprobs)}f", *logprobs), dtype=np.float32)
        except (struct.error, OverflowError):
            # A None, or a number too large for float32.
            pass
    array = np.array(logprobs, dtype=np.float32).reshape(-1)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True)
class Sampling:
    """The effective sampling parameters of a call, after session overrides and clamping.

    None: neither the harness nor the session set it, so the engine's default applied. `extra` has everything else in effect that may
    have bent the choice of a token (see `proxy/call/record.py`).
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    extra: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A call's place in the session tree, and its tokens: m sampled ids, m logprobs, and `spans` and `modes` that each tile 0..m.

    `media` are those of the delta, by positions in it."""

    parent_id: str | None
    branch_reason: str | None
    base_id: str | None
    base_length: int
    delta_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    spans: tuple[Span, ...]
    modes: tuple[ModeSpan, ...]
    details: CallDetails | None = None
    media: tuple[Media, ...] = ()

    def check(self, *, session_id: str = "", call_id: str = "") -> None:
        """Raise a RecordError if lengths, logprobs, spans, modes or ids break a rule; nothing is repaired."""
        where: dict[str, Any] = {"session_id": session_id, "call_id": call_id}
        sampled = len(self.completion_ids)
        if len(self.logprobs) != sampled:
            raise LengthMismatch(f"{sampled} sampled ids but {len(self.logprobs)} logprobs", **where)
        finite = np.isfinite(self.logprobs)
        if not finite.all():
            raise MissingLogprob("a sampled token has no finite logprob", **where, position=int(np.argmin(finite)))
        for ids in (self.delta_ids, self.completion_ids):
            if len(ids) and int(ids.min()) < 0:
                raise IdOutOfRange(f"id {int(ids.min())} is negative", **where, position=int(ids.argmin()))
        self._check_spans(where)
        self._check_modes(where)
        if self.media:
            _check_media(self.media, len(self.delta_ids), where)
        if self.details is not None:
            _check_details(self.details, len(self.delta_ids), sampled, where)

    def _check_spans(self, where: dict[str, Any]) -> None:
        end = 0
        for span in self.spans:
            if span.start != end or span.end <= span.start or span.version < 0:
                raise SpanError(f"span {span} does not continue at {end}", **where, position=end)
            end = span.end
        if end != len(self.completion_ids):
            raise SpanError(f"spans cover {end} of {len(self.completion_ids)} sampled tokens", **where, position=end)

    def _check_modes(self, where: dict[str, Any]) -> None:
        end = 0
        for span in self.modes:
            if span.start != end or span.end <= span.start:
                raise LengthMismatch(f"{span} does not continue at {end}", **where, position=end)
            end = span.end
        if end != len(self.completion_ids):
            raise LengthMismatch(
                f"logprob modes cover {end} of {len(self.completion_ids)} sampled tokens", **where, position=end
            )


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One LLM request and its reply, as written to the store in one piece.

    `messages` is the JSON array of the request's messages from index `messages_from` on; the earlier ones are the parent's messages
    and its reply. `root_key` identifies what the rendering depends on besides the canonical messages (messages.render_key). `fingerprint`
    is the hash chain over the request's canonical messages, `reply_fingerprint` the chain including the reply: the hash of a
    continuing call's history (see messages.py). `preamble` (roots only) is the JSON object of model, tools and template kwargs.
    `engine_tool_call_ids` are the ids under which the engine knows the reply's tool calls, in their order: they stand in its prompts for
    the minted ones that the harness sends. `marks`: "retry" (the attempt's number, from the harness's headers); MODEL; the "policy" that
    sampled it unless it is the default one; INVALID_TOOL_CALL; CONTROL_TOKENS, a JSON list (see proxy/call/record.py); BASE_VERSIONS;
    in a fork, REPLAY and DIFFERS; LOOKAHEAD of candidates.
    `role_source`: DECLARED, RULE or INFERRED.
    """

    call_id: str
    session_id: str
    node: Node
    dialect: str
    api: str
    status: str
    role: str
    agent: str
    finish_reason: str
    stop_reason: str | int | None
    sampling: Sampling
    root_key: bytes
    fingerprint: bytes
    reply_fingerprint: bytes
    message_count: int
    messages_from: int
    messages: bytes
    reply: bytes
    preamble: bytes
    digest: bytes
    projection: str
    replica: str
    started_at: float
    engine_seconds: float
    own_seconds: float
    trainable: bool = True
    quarantine_reason: str = ""
    marks: Mapping[str, str] = field(default_factory=dict)
    role_source: str = INFERRED
    engine_tool_call_ids: tuple[str, ...] = ()

    @property
    def ids_known(self) -> bool:
        """Whether the engine reported the ids of the prompt and the reply. If not, the node's arrays are not what the model saw and
        sampled: see Forest.known_ids."""
        return self.quarantine_reason != NO_TOKEN_IDS

    @property
    def invalid_tool_call(self) -> bool:
        """Whether a tool call of the reply is none, or not whole: see proxy/call/record.py."""
        return INVALID_TOOL_CALL in self.marks

    @property
    def policy(self) -> str:
        """The model that sampled the call, whose weight versions its spans have; "" is the default one."""
        return self.marks.get("policy", "")

    @property
    def base_versions(self) -> list[list[int]]:
        """See BASE_VERSIONS; empty if the base model sampled it."""
        found: list[list[int]] = json.loads(self.marks.get(BASE_VERSIONS, "[]"))
        return found

    @property
    def control_tokens(self) -> list[str]:
        """The control tokens in its new messages."""
        found: list[str] = json.loads(self.marks.get(CONTROL_TOKENS, "[]"))
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of the decoded arrays and texts; the record may be far smaller because texts are compressed."""
        node = self.node
        arrays = node.delta_ids.nbytes + node.completion_ids.nbytes + node.logprobs.nbytes
        details = 0 if node.details is None else node.details.size_bytes
        return arrays + details + len(self.messages) + len(self.reply) + len(self.preamble)


def find_engine_id(calls: Mapping[str, Call], identifier: str) -> str:
    """The engine's own id for a tool-call id that was minted into the reply of one of `calls`; any other id as it is."""
    place = read_tool_call_id(identifier)
    call = calls.get(place[0]) if place is not None else None
    if place is None or call is None or place[1] >= len(call.engine_tool_call_ids):
        return identifier
    return call.engine_tool_call_ids[place[1]]


def _check_details(details: CallDetails, delta: int, sampled: int, where: dict[str, Any]) -> None:
    """Raise LengthMismatch unless they fit `delta` prompt tokens and `sampled` sampled ones."""
    if not of_one_shape(details.top_token_ids, details.top_logprobs):
        raise LengthMismatch("top_token_ids and top_logprobs differ in shape", **where)
    for name, array, length in (
        ("top_token_ids", details.top_token_ids, sampled),
        ("top_logprobs", details.top_logprobs, sampled),
        ("prompt_logprobs", details.prompt_logprobs, delta),
    ):
        if array is not None and len(array) != length:
            raise LengthMismatch(f"{name} has {len(array)} tokens, not {length}", **where)


def _check_media(media: Sequence[Media], length: int, where: dict[str, Any]) -> None:
    """Raise LengthMismatch unless they stand in order, apart, and within `length` ids."""
    end = 0
    for each in media:
        if each.start < end or each.length < 1 or each.end > length:
            raise LengthMismatch(f"{each} is not within {end} to {length}", **where, position=each.start)
        end = each.end


# Forest: the calls of one session, their parents, and the ids each was sampled after.
#
# Invariant, of calls whose ids are known:
# `full_ids(c) == prompt_ids(c) + completion_ids(c)` and `prompt_ids(c) == full_ids(base)[:base_length] + delta_ids`;
# a base is added before the calls that refer to it. All walks are loops, so any depth works. The forest holds only deltas; a prompt is
# assembled on request.


def order_key(call: Call) -> tuple[float, str]:
    """The canonical order of calls, independent of arrival: by start, then id."""
    return (call.started_at, call.call_id)


def request_of(call: Call) -> tuple[object, ...]:
    """Equal for the choices of one request alone."""
    return call.session_id, call.node.parent_id, call.fingerprint, call.root_key, call.digest, call.started_at


class Forest:
    """The calls of one session in insertion order, with indexes to find a parent. `detailed`: a call has details; `controlled`: a call
    has control tokens in its messages; `has_media`: a call's prompt has media."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self.calls: dict[str, Call] = {}
        self._by_reply: dict[bytes, list[str]] = {}
        self._by_prompt: dict[bytes, list[str]] = {}
        self._children: dict[str | None, list[str]] = {}
        self._lengths: dict[str, int] = {}
        self._owners: dict[str, str | None] = {}
        self._extended: dict[str, str] = {}
        """The parent of each call that extends it."""
        self.detailed = False
        self.controlled = False
        self.has_media = False
        for call in calls:
            self.add(call)

    def __len__(self) -> int:
        return len(self.calls)

    def __contains__(self, call_id: object) -> bool:
        return call_id in self.calls

    def add(self, call: Call) -> None:
        """Add one call; adding it again is a no-op.

        Raises UnknownParent if its parent or base is missing, LengthMismatch if its base is shorter than `base_length` or has media that
        this cuts apart.
        """
        if call.call_id in self.calls:
            return
        node = call.node
        for named in (node.parent_id, node.base_id):
            if named is not None and named not in self.calls:
                raise UnknownParent(f"call {named} is not in the session", session_id=call.session_id, call_id=call.call_id)
        available = self._lengths[node.base_id] if node.base_id is not None else 0
        if not 0 <= node.base_length <= available:
            raise LengthMismatch(
                f"the base has {available} ids, fewer than the {node.base_length} referred to",
                session_id=call.session_id,
                call_id=call.call_id,
            )
        if self.has_media and node.base_id is not None and self._cuts_media(node.base_id, node.base_length):
            raise LengthMismatch(
                f"the first {node.base_length} ids of the base end within a media range",
                session_id=call.session_id,
                call_id=call.call_id,
            )
        self.calls[call.call_id] = call
        self._lengths[call.call_id] = node.base_length + len(node.delta_ids) + len(node.completion_ids)
        self._owners[call.call_id] = self._owner(node.base_id, node.base_length)
        if call.quarantine_reason != NOT_CHOSEN:
            self._by_reply.setdefault(call.reply_fingerprint, []).append(call.call_id)
            self._by_prompt.setdefault(call.fingerprint, []).append(call.call_id)
        self._children.setdefault(node.parent_id, []).append(call.call_id)
        self.detailed = self.detailed or node.details is not None
        self.controlled = self.controlled or CONTROL_TOKENS in call.marks
        self.has_media = self.has_media or bool(node.media)
        if node.parent_id is not None and self._begins_with(call, node.parent_id):
            self._extended[call.call_id] = node.parent_id

    def children(self, call_id: str | None) -> Sequence[str]:
        return self._children.get(call_id, ())

    def find_by_reply(self, fingerprint: bytes) -> Sequence[str]:
        """The calls whose history including the reply hashes to `fingerprint`, oldest first."""
        return self._by_reply.get(fingerprint, ())

    def find_by_prompt(self, fingerprint: bytes) -> Sequence[str]:
        """The calls whose request hashes to `fingerprint`, oldest first."""
        return self._by_prompt.get(fingerprint, ())

    def full_length(self, call_id: str) -> int:
        return self._lengths[call_id]

    def prompt_length(self, call_id: str) -> int:
        return self._lengths[call_id] - len(self.calls[call_id].node.completion_ids)

    def full_ids(self, call_id: str) -> Ids:
        return self.prefix(call_id, self._lengths[call_id])

    def known_ids(self, call_id: str) -> Ids | None:
        """All ids of the call's prompt and completion; None if its engine did not report them."""
        return self.full_ids(call_id) if self.calls[call_id].ids_known else None

    def prompt_ids(self, call_id: str) -> Ids:
        return self.prefix(call_id, self.prompt_length(call_id))

    def prefix(self, call_id: str, length: int) -> Ids:
        """The first `length` ids of the call's prompt and completion, as read-only int32 of shape (length,)."""
        parts = []
        for owner, start, end in self.pieces(call_id, length):
            node, own = self.calls[owner].node, end - start
            if own > len(node.delta_ids):
                parts.append(node.completion_ids[: own - len(node.delta_ids)])
            parts.append(node.delta_ids[:own])
        parts.reverse()
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def media(self, call_id: str) -> tuple[Media, ...]:
        """The media of the call's prompt, by positions in it."""
        return self.prefix_media(call_id, self._lengths[call_id]) if self.has_media else ()

    def prefix_media(self, call_id: str, length: int) -> tuple[Media, ...]:
        """Those of the first `length` ids of the call's prompt and completion."""
        parts = [
            [each for each in shift(self.calls[owner].node.media, start) if each.end <= end]
            for owner, start, end in self.pieces(call_id, length)
        ]
        return tuple(each for part in reversed(parts) for each in part)

    def pieces(self, call_id: str, length: int) -> Iterator[tuple[str, int, int]]:
        """The calls that store the first `length` ids of the call's prompt and completion, each as (call, start, end), last first."""
        current = self._owner(call_id, length)
        while current is not None:
            start = self.calls[current].node.base_length
            yield current, start, length
            length = start
            current = self._owners[current]

    def extends(self, call_id: str) -> bool:
        """Whether the call's prompt is all of its parent's ids followed by its own, so that one row may contain both.

        Those ids may be stored elsewhere: the choices of one request refer to the first of them.
        """
        return call_id in self._extended

    def extended_by(self, call_id: str) -> str | None:
        """The parent that the call extends; None if it extends none."""
        return self._extended.get(call_id)

    def branch(self, call_id: str) -> list[str]:
        """The calls of the row that ends at `call_id`, first to last: back while each extends its parent."""
        path = [call_id]
        while (parent_id := self.extended_by(path[-1])) is not None:
            path.append(parent_id)
        path.reverse()
        return path

    def lineage(self, call_id: str | None) -> Iterator[Call]:
        """The call and its ancestors, whether or not they share tokens."""
        while call_id is not None:
            call = self.calls[call_id]
            yield call
            call_id = call.node.parent_id

    def in_order(self) -> list[Call]:
        return sorted(self.calls.values(), key=order_key)

    def _owner(self, call_id: str | None, length: int) -> str | None:
        """The call, or the base of it, that stores the last of its first `length` ids; None for no ids.

        The owner of each call's base is cached, so a walk takes one step per call that stores ids of the prompt, however long the
        chain of references.
        """
        if length <= 0:
            return None
        while call_id is not None and length <= self.calls[call_id].node.base_length:
            call_id = self._owners[call_id]
        return call_id

    def _begins_with(self, call: Call, parent_id: str) -> bool:
        if self._lengths[parent_id] > self.prompt_length(call.call_id):
            return False
        if not self.calls[parent_id].ids_known:
            return False
        # A row belongs to one policy: its weight versions are that policy's.
        if self.calls[parent_id].policy != call.policy:
            return False
        return self._agree(call.call_id, parent_id, self._lengths[parent_id])

    def _cuts_media(self, call_id: str, length: int) -> bool:
        owner = self._owner(call_id, length)
        node = self.calls[owner].node if owner is not None else None
        return node is not None and any(each.start < length - node.base_length < each.end for each in node.media)

    def _agree(self, left_id: str, right_id: str, length: int) -> bool:
        """Whether both calls have the same first `length` ids, and the same media behind them. Only ids not shared through bases are
        compared: none for a call whose base is all of its parent."""
        left, right = self._owner(left_id, length), self._owner(right_id, length)
        # Both are None once no ids are left.
        while left is not None and right is not None and left != right:
            one, other = self.calls[left].node, self.calls[right].node
            start = max(one.base_length, other.base_length)
            if not np.array_equal(_own_ids(one, start, length), _own_ids(other, start, length)):
                return False
            if self.has_media and _own_media(one, start, length) != _own_media(other, start, length):
                return False
            length = start
            left, right = self._owner(left, length), self._owner(right, length)
        return True


def _own_ids(node: Node, start: int, end: int) -> Ids:
    """The node's own ids (delta, then completion) at positions `start:end`, which are after its base."""
    start, end, delta = start - node.base_length, end - node.base_length, len(node.delta_ids)
    if end <= delta:
        return node.delta_ids[start:end]
    if start >= delta:
        return node.completion_ids[start - delta : end - delta]
    return np.concatenate((node.delta_ids[start:], node.completion_ids[: end - delta]))


def _own_media(node: Node, start: int, end: int) -> list[Media]:
    """The node's own media with ids at positions `start:end`."""
    return overlapping(shift(node.media, node.base_length), start, end)


def shared_length(left: Ids, right: Ids) -> int:
    """The length of the common prefix."""
    length = min(len(left), len(right))
    different = left[:length] != right[:length]
    return int(different.argmax()) if np.count_nonzero(different) else length
