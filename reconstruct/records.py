"""The records: what one call put before the model and what the model said.

A session is a forest of nodes. A node does not hold its whole prompt; it names a *base* it shares a prefix with:

    prompt_ids(node) == (prompt_ids(base) + completion_ids(base))[:base_length] + delta_ids

so storage grows with the new tokens, not with the history. `parent_id` says what the call *means* (which call it
continues), `base_id` only where its first ids are stored. A node *extends* its parent when the base is the parent and
`base_length` is all of it: only then does one training row run through both.

Arrays are packed once: ids int32, logprobs float32, both read-only and of the engine's own order.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from reconstruct.errors import IdOutOfRange, LengthMismatch, MissingLogprob, SpanError

if TYPE_CHECKING:
    pass


RAW, PROCESSED, UNKNOWN_MODE = "raw_logprobs", "processed_logprobs", "unknown"
NO_LOGPROBS = ("raw_logits", "processed_logits")
"""Logprob modes of vLLM under which an engine reports logits in the place of logprobs."""

NO_TOKEN_IDS = "no_token_ids"
"""Why a call is not trained whose engine did not tell the ids of its prompt and of its reply."""

DECLARED, RULE, INFERRED = "declared", "rule", "inferred"
"""Who says what role a call has: the harness or its definition, a rule of the operator, or nobody."""

CONTROL_TOKENS = "control_tokens"
"""The mark of a call whose new messages hold control tokens in their text, and a row's metadata of them."""

INVALID_TOOL_CALL = "invalid_tool_call"
"""The mark of a call whose reply has a tool call that the engine's parser could not read."""

Ids = NDArray[np.int32]
Logprobs = NDArray[np.float32]


def pack_ids(ids: Any) -> Ids:
    """`ids` as a read-only int32 array of shape (n,). Raises IdOutOfRange for one that int32 cannot hold."""
    if type(ids) is list:
        return _packed_ids(ids)
    try:
        array = np.array(ids, dtype=np.int32).reshape(-1)
    except OverflowError as error:
        raise IdOutOfRange(f"a token id does not fit 32 bits: {error}") from error
    array.flags.writeable = False
    return array


def _packed_ids(ids: list[int]) -> Ids:
    """`struct` takes a list of integers in half of numpy's time, and takes nothing else for one."""
    try:
        return np.frombuffer(struct.pack(f"={len(ids)}i", *ids), dtype=np.int32)
    except struct.error as error:
        raise IdOutOfRange(f"a token id is no integer of 32 bits: {error}") from error


def pack_logprobs(logprobs: Any) -> Logprobs:
    """`logprobs` as a read-only float32 array of shape (n,); a None becomes NaN and is refused by `Node.check`."""
    if type(logprobs) is list:
        try:
            return np.frombuffer(struct.pack(f"={len(logprobs)}f", *logprobs), dtype=np.float32)
        except (struct.error, OverflowError):
            # A None, or a number that is infinite as a float32.
            pass
    array = np.array(logprobs, dtype=np.float32).reshape(-1)
    array.flags.writeable = False
    return array


@dataclass(frozen=True, slots=True)
class Span:
    """Sampled tokens `start:end` of one call were sampled under weights `version`."""

    version: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """The sampling parameters that were in effect for a call, after session overrides and clamping.

    None means that neither the harness nor the session set it and the engine's own default applied.
    `logprob_mode` is the engine's: "raw_logprobs" ignores temperature and truncation, "processed_logprobs" does not; "unknown" when
    neither the engine nor its operator says. What is reported under one of NO_LOGPROBS is never trained.
    """

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprob_mode: str = UNKNOWN_MODE
    extra: Mapping[str, Any] = field(default_factory=dict)


# Details: what an engine says of tokens beside the logprob of each sampled one, kept where it was asked for.
#
# A call keeps only what is new: the most probable tokens at its sampled positions, the logprobs of its delta, and the experts of the
# positions that its base does not know. `row_details` lays the details of a row's calls out by the row's own positions. Nothing here
# decides what is trained: a detail that is missing is marked as missing.


Experts: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16]


@dataclass(frozen=True, slots=True, eq=False)
class CallDetails:
    """Of one call with d delta ids and m sampled ones; None: the engine did not say.

    `top_token_ids` int32 and `top_logprobs` float32, both (m, k): the k most probable tokens where each token was sampled, the most
    probable first; NO_TOKEN and NaN where there are fewer. `prompt_logprobs` float32 (d,): of the delta's tokens as they were given;
    NaN for a session's very first. `routed_experts` uint8 or uint16 (r, layers, experts per token): of the r positions from
    `routed_from` on, counted in the call's prompt and reply. An engine computes none for the last sampled token of a call: the call
    that continues it brings them.
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
        """Raise LengthMismatch when they are not of `delta` given and `sampled` sampled tokens."""
        if not of_one_shape(self.top_token_ids, self.top_logprobs):
            raise LengthMismatch("top_token_ids and top_logprobs differ in shape", **where)
        for name, array, length in (
            ("top_token_ids", self.top_token_ids, sampled),
            ("top_logprobs", self.top_logprobs, sampled),
            ("prompt_logprobs", self.prompt_logprobs, delta),
        ):
            if array is not None and len(array) != length:
                raise LengthMismatch(f"{name} is of {len(array)} tokens, not of {length}", **where)

    def told_after(self, base_length: int, delta: int) -> CallDetails | None:
        """The same of a whole prompt, cut to what a call stores that leans on `base_length` ids and has `delta` ids of its own.

        One position of routing stays that the base may lack, its last token's."""
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
    """One call's place in the session tree and its tokens. Lengths: m sampled ids, m logprobs, spans tile 0..m."""

    parent_id: str | None
    branch_reason: str | None
    base_id: str | None
    base_length: int
    delta_ids: Ids
    completion_ids: Ids
    logprobs: Logprobs
    spans: tuple[Span, ...]
    details: CallDetails | None = None

    def check(self, *, session_id: str = "", call_id: str = "") -> None:
        """Raise a RecordError when lengths, logprobs, spans or ids break the rules; never repair."""
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

    `messages` is the JSON array of the request's messages from index `messages_from` on; the ones before are the
    parent's messages and its reply. `root_key` is what its rendering depends on beside its canonical messages (messages.dress).
    `fingerprint` is the hash chain over the request's canonical messages,
    `reply_fingerprint` the chain after the reply: what a continuing call's history hashes to (see messages.py).
    `preamble` (roots only) is the JSON object of model, tools and template kwargs. `marks` are what the harness itself said of the
    call in its headers: "retry" (the attempt's number); the "policy" that sampled it, unless it was the default one; INVALID_TOOL_CALL;
    and CONTROL_TOKENS, a JSON list (see proxy/call/record.py). `role_source` says who says so of the role: DECLARED, RULE or INFERRED.
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
        """Whether the engine told the ids of the prompt and of the reply. Where it did not, the node's arrays hold what it told, and
        say nothing of what the model saw or said: see Forest.known_ids."""
        return self.quarantine_reason != NO_TOKEN_IDS

    @property
    def invalid_tool_call(self) -> bool:
        """Whether the engine's parser could not read a tool call of the reply."""
        return INVALID_TOOL_CALL in self.marks

    @property
    def policy(self) -> str:
        """The named model that sampled the call, whose weights its spans count; "" is the default one."""
        return self.marks.get("policy", "")

    @property
    def control_tokens(self) -> list[str]:
        """Those that stand in its new messages, where any do."""
        found: list[str] = json.loads(self.marks.get(CONTROL_TOKENS, "[]"))
        return found

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays and texts, as they are decoded: a record may be far smaller, for its texts are compressed."""
        node = self.node
        arrays = node.delta_ids.nbytes + node.completion_ids.nbytes + node.logprobs.nbytes
        details = 0 if node.details is None else node.details.size_bytes
        return arrays + details + len(self.messages) + len(self.reply) + len(self.preamble)


NO_TOKEN = -1
NO_EXPERT = -1


def of_one_shape(left: NDArray[Any] | None, right: NDArray[Any] | None) -> bool:
    """Whether both are there with the same shape, or neither is there."""
    return (None if left is None else left.shape) == (None if right is None else right.shape)
