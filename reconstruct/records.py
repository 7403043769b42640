"""The records: the tokens that one call gave to the model and those it sampled.

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
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconstruct.errors import IdOutOfRange, LengthMismatch, MissingLogprob, SpanError
from reconstruct.media import Media, check_media

RAW, PROCESSED, UNKNOWN_MODE = "raw_logprobs", "processed_logprobs", "unknown"
NO_LOGPROBS = ("raw_logits", "processed_logits")
"""Logprob modes of vLLM in which an engine reports logits instead of logprobs."""

NO_TOKEN_IDS = "no_token_ids"
"""The quarantine reason of a call whose engine did not report the ids of its prompt and reply."""

DECLARED, RULE, INFERRED = "declared", "rule", "inferred"
"""The source of a call's role: the harness or its definition, a rule of the operator, or inference."""

CONTROL_TOKENS = "control_tokens"
"""The mark of a call whose new messages contain control tokens in their text; also a key of a row's metadata."""

INVALID_TOOL_CALL = "invalid_tool_call"
"""The mark of a call whose reply has a tool call that the engine's parser could not parse."""

REPLAY, PIVOT, DIVERGED = "replay", "pivot", "diverged"
"""The mark of calls that a fork sampled where others were recorded, and its values: PIVOT, the request from which the fork samples;
DIVERGED, one that was not recorded."""

DIFFERS = "replay_differs"
"""The mark of a fork's calls whose tool results, or those before them, differ from the record. What was replayed has no known ids."""

LOOKAHEAD, CHOSEN, NOT_CHOSEN = "lookahead", "chosen", "not_chosen"
"""The mark of the candidates of a lookahead, and its values. NOT_CHOSEN is the quarantine reason, too: no harness saw such a reply, so
nothing continues it."""

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]


def pack_ids(ids: Any) -> Ids:
    """`ids` as a read-only int32 array of shape (n,). Raises IdOutOfRange for an id beyond int32."""
    if type(ids) is list:
        return _pack_list(ids)
    try:
        array = np.array(ids, dtype=np.int32).reshape(-1)
    except OverflowError as error:
        raise IdOutOfRange(f"a token id does not fit 32 bits: {error}") from error
    array.flags.writeable = False
    return array


def _pack_list(ids: list[int]) -> Ids:
    """`struct` packs a list of integers in half of numpy's time and accepts nothing else."""
    try:
        return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), dtype=np.int32)
    except struct.error as error:
        raise IdOutOfRange(f"a token id is no integer of 32 bits: {error}") from error


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
class Span:
    """The sampled tokens `start:end` of a call were sampled under weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The effective sampling parameters of a call, after session overrides and clamping.

    None: neither the harness nor the session set it, so the engine's default applied. `logprob_mode` is the engine's: "raw_logprobs"
    ignores temperature and truncation, "processed_logprobs" does not; "unknown" if neither the engine nor its operator says. Calls
    with one of NO_LOGPROBS are never trained.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprob_mode: str = UNKNOWN_MODE
    extra: Mapping[str, Any] = field(default_factory=dict)


# Details: what an engine reports of tokens besides the logprobs of sampled ones, if requested. A call stores only what is new: the
# top tokens at its sampled positions, the logprobs of its delta, and the experts of positions that its base lacks. `row_details`
# aligns them with a row. Details never decide what is trained; missing ones are marked as missing.


Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class CallDetails:
    """The details of a call with d delta ids and m sampled ones; None: not reported.

    `top_token_ids` int32 and `top_logprobs` float32, both (m, k): the k most probable tokens at each sampled position, the most
    probable first; NO_TOKEN and NaN if there are fewer. `prompt_logprobs` float32 (d,): of the delta's tokens; NaN for a session's
    first. `routed_experts` uint8 or uint16 (r, layers, experts per token): of the r positions from `routed_from` on, counted in the
    call's prompt and reply. An engine computes none for the last sampled token; the call that continues it has them.
    """

    top_token_ids: NDArray[np.int32] | None = None
    top_logprobs: NDArray[np.float32] | None = None
    prompt_logprobs: NDArray[np.float32] | None = None
    routed_experts: Experts | None = None
    routed_from: int = 0

    @property
    def empty(self) -> bool:
        return self.top_token_ids is None and self.prompt_logprobs is None and self.routed_experts is None

    @property
    def size_bytes(self) -> int:
        arrays = (self.top_token_ids, self.top_logprobs, self.prompt_logprobs, self.routed_experts)
        return sum(array.nbytes for array in arrays if array is not None)

    def check(self, delta: int, sampled: int, where: dict[str, Any]) -> None:
        """Raise LengthMismatch unless they fit `delta` prompt tokens and `sampled` sampled ones."""
        if not of_one_shape(self.top_token_ids, self.top_logprobs):
            raise LengthMismatch("top_token_ids and top_logprobs differ in shape", **where)
        for name, array, length in (
            ("top_token_ids", self.top_token_ids, sampled),
            ("top_logprobs", self.top_logprobs, sampled),
            ("prompt_logprobs", self.prompt_logprobs, delta),
        ):
            if array is not None and len(array) != length:
                raise LengthMismatch(f"{name} has {len(array)} tokens, not {length}", **where)

    def cut_to_delta(self, base_length: int, delta: int) -> CallDetails | None:
        """These details of a whole prompt, cut to those that a call with `base_length` ids of its base and `delta` own ids stores.

        Keeps the routing of the base's last position, which the base may lack."""
        prompt_logprobs, routed, first = self.prompt_logprobs, self.routed_experts, self.routed_from
        if prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs[base_length : base_length + delta] if delta else None
        if routed is not None:
            kept = max(0, base_length - 1 - first)
            routed, first = (routed[kept:], first + kept) if kept < len(routed) else (None, 0)
        cut = CallDetails(self.top_token_ids, self.top_logprobs, prompt_logprobs, routed, first)
        return None if cut.empty else cut


@dataclass(frozen=True, slots=True, eq=False)
class Node:
    """A call's place in the session tree, and its tokens: m sampled ids, m logprobs, and spans that tile 0..m.

    `media` are those of the delta, by positions in it."""

    parent_id: str | None
    branch_reason: str | None
    base_id: str | None
    base_length: int
    delta_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    spans: tuple[Span, ...]
    details: CallDetails | None = None
    media: tuple[Media, ...] = ()

    def check(self, *, session_id: str = "", call_id: str = "") -> None:
        """Raise a RecordError if lengths, logprobs, spans or ids break a rule; nothing is repaired."""
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
        check_media(self.media, len(self.delta_ids), where)
        if self.details is not None:
            self.details.check(len(self.delta_ids), sampled, where)

    def _check_spans(self, where: dict[str, Any]) -> None:
        end = 0
        for span in self.spans:
            if span.start != end or span.end <= span.start or span.version < 0:
                raise SpanError(f"span {span} does not continue at {end}", **where, position=end)
            end = span.end
        if end != len(self.completion_ids):
            raise SpanError(f"spans cover {end} of {len(self.completion_ids)} sampled tokens", **where, position=end)


@dataclass(frozen=True, slots=True, eq=False)
class Call:
    """One LLM request and its reply, as written to the store in one piece.

    `messages` is the JSON array of the request's messages from index `messages_from` on; the earlier ones are the parent's messages
    and its reply. `root_key` identifies what the rendering depends on besides the canonical messages (messages.dress). `fingerprint`
    is the hash chain over the request's canonical messages, `reply_fingerprint` the chain including the reply: the hash of a
    continuing call's history (see messages.py). `preamble` (roots only) is the JSON object of model, tools and template kwargs.
    `marks`: "retry" (the attempt's number, from the harness's headers); the "policy" that sampled it unless it is the default one;
    INVALID_TOOL_CALL; CONTROL_TOKENS, a JSON list (see proxy/call/record.py); in a fork, REPLAY and DIFFERS; LOOKAHEAD of candidates.
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

    @property
    def ids_known(self) -> bool:
        """Whether the engine reported the ids of the prompt and the reply. If not, the node's arrays are not what the model saw and
        sampled: see Forest.known_ids."""
        return self.quarantine_reason != NO_TOKEN_IDS

    @property
    def invalid_tool_call(self) -> bool:
        """Whether the engine's parser could not parse a tool call of the reply."""
        return INVALID_TOOL_CALL in self.marks

    @property
    def policy(self) -> str:
        """The model that sampled the call, whose weight versions its spans have; "" is the default one."""
        return self.marks.get("policy", "")

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


NO_TOKEN = -1
NO_EXPERT = -1


def of_one_shape(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """Whether both have the same shape, or both are None."""
    return (None if left is None else left.shape) == (None if right is None else right.shape)
