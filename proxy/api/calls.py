"""The calls of a session and the training rows built from them, over HTTP, with the models that describe both."""

from __future__ import annotations

import asyncio
import json
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, Query, Request, Response
from pydantic import Field

from contract.attempts import ENDED
from contract.batches import AccountingView
from contract.sessions import Role
from proxy import rows
from proxy.api.closing import load_session
from proxy.api.requests import (
    ENCODINGS,
    Body,
    Encoding,
    PageCursor,
    PageSize,
    Served,
    SessionId,
    choose_form,
    encode_each,
    encode_response,
    require_owner,
)
from proxy.errors import TooLarge
from proxy.rows import CallsCursor
from reconstruct.trace import trace_entries
from reconstruct.trajectory import encode_accounting, encode_row

router = APIRouter(prefix="/sessions/{session_id}", tags=["sessions"], default_response_class=Response)

Span = Annotated[list[int], Field(min_length=3, max_length=3)]
"""[version, start, end]"""
ModeSpan = tuple[Literal["raw", "processed", "masked", "unknown", "logits"], int, int]
"""[mode, start, end]"""


class MediaShape(Body):
    digest: str
    """sha256 of the bytes that the harness sent, which `GET /sessions/{session_id}/media/{digest}` returns."""
    kind: Literal["image"]
    start: int
    """The position of the first id that stands for it."""
    length: int


class CallShape(Body):
    call_id: str
    parent_id: str | None
    """The call whose context it continues; null: a root."""
    branch_reason: str | None
    """Why it does not simply extend its parent."""
    role: str | None
    role_source: str | None
    """Where the role comes from: declared (the harness or its definition), rule (the operator's) or inferred."""
    dialect: str | None
    api: str | None
    """The engine API it used: token, completions, sglang or chat."""
    model: str | None
    """The model name the harness requested."""
    status: str
    """finished; aborted: it was cut; failed: the engine broke off; in_flight; dangling: its process died."""
    prompt_ids: list[int]
    media: list[MediaShape]
    """The images of the prompt, by positions in prompt_ids."""
    completion_ids: list[int]
    logprobs: list[float]
    """As long as completion_ids."""
    logprob_modes: list[ModeSpan]
    """What the logprobs were taken from: spans over completion_ids."""
    weight_versions: list[Span]
    """Spans over completion_ids."""
    finish_reason: str | None
    stop_reason: str | int | None = None
    invalid_tool_call: bool
    """Whether a tool call of the reply could not be parsed, is of no offered tool, does not fit its schema or was not finished."""
    sampling: dict[str, Any] | None
    """The parameters in effect: with a fixed set of names, and any other that may have bent the choice of a token."""
    delivered: bool
    """Whether the whole answer was sent."""
    projection: str | None = None
    """The declared equality under which its history was recognised."""
    control_tokens: list[str] | None = None
    """Turn delimiters of the chat template that occur in the text of its new messages."""
    messages: list[dict[str, Any]] | None
    reply: dict[str, Any] | None
    engine_tool_call_ids: list[str] | None = None
    """The ids that the engine's prompts show for the reply's tool calls, in their order. The reply has those that the harness got."""
    session_id: str | None
    """The session that sampled it; in a fork another one's for replayed calls."""
    replay: str | None = None
    """Of what a fork sampled. pivot: the recorded request from which it samples; diverged: a request that was not recorded."""
    lookahead: str | None = None
    """Of a candidate. chosen: the harness got it; not_chosen: it did not, and it is not trained."""
    replica: str | None
    started_at: float
    engine_seconds: float | None
    own_seconds: float | None


CALL: dict[str, Any] = json.loads("""
{"call_id": "c0ffee", "parent_id": null, "branch_reason": null, "role": "main", "role_source": "inferred",
 "dialect": "chat", "api": "token", "model": "policy", "status": "finished", "prompt_ids": [101, 102],
 "media": [], "completion_ids": [7, 8], "logprobs": [-0.5, -1.25], "logprob_modes": [["raw", 0, 2]],
 "weight_versions": [[12, 0, 2]], "finish_reason": "stop",
 "stop_reason": null, "invalid_tool_call": false, "sampling": {"temperature": 1.0, "max_tokens": 32}, "delivered": true,
 "projection": null, "control_tokens": [], "messages": [{"role": "user", "content": "Say hello."}],
 "reply": {"role": "assistant", "content": "Hello."}, "engine_tool_call_ids": [], "session_id": "first",
 "replay": null, "lookahead": null, "replica": "127.0.0.1:8000", "started_at": 1767225600.0,
 "engine_seconds": 0.8, "own_seconds": 0.001}
""")


class CallPage(Body, json_schema_extra={"example": {"calls": [CALL], "cursor": None}}):
    calls: list[CallShape]
    cursor: str | None


class ScoreView(Body):
    logprobs: list[float | None]
    """As long as token_ids, of the token itself; null where nothing is known."""
    top_ids: list[list[int]]
    """The k most probable ids there, the most probable first; -1 where nothing is known."""
    top_logprobs: list[list[float | None]]
    policy: str
    """That scored, whose versions `weight_versions` counts."""
    weight_versions: list[Span]
    mode: str
    error: str = ""
    """Why trained tokens have no score."""


class TrajectoryView(Body):
    trajectory_id: str
    """The same calls always give the same id."""
    session_id: str
    group_id: str | None
    task_id: str | None
    role: Role
    role_source: Literal["declared", "rule", "inferred"]
    """Where the role comes from: the harness or its definition, an operator's rule, or inference."""
    agent: str | None
    token_ids: list[int]
    """Starts with the first prompt."""
    loss_mask: list[Literal[0, 1]]
    """As long as token_ids; 1: sampled, and trained in this row."""
    logprobs: list[float]
    """As long as token_ids; 0.0 where the mask is 0."""
    logprob_modes: list[ModeSpan]
    """What they were taken from: spans that cover exactly the trained tokens."""
    weight_versions: list[Span]
    """Spans that cover exactly the trained tokens."""
    reward: float | None
    call_ids: list[str]
    finish_reason: str | None
    truncated: bool
    metadata: dict[str, Any]
    rollout_id: str
    row_weight: float
    """1 / (the rollout's rows of this policy that have trained tokens)"""
    policy: str
    """Empty: the default one."""
    media: list[MediaShape]
    """The images in it, by positions in token_ids; never trained."""
    top_token_ids: list[Any] | None = None
    top_logprobs: list[Any] | None = None
    prompt_logprobs: list[float | None] | None = None
    routed_experts: list[Any] | None = None
    scores: dict[str, ScoreView] | None = None
    """What scorers say of the trained tokens, by the scorer's name."""


ROW: dict[str, Any] = json.loads("""
{"trajectory_id": "6f1c7d0a", "session_id": "first", "group_id": "task-1", "task_id": null, "role": "main",
 "role_source": "inferred", "agent": "", "token_ids": [101, 102, 7, 8], "loss_mask": [0, 0, 1, 1],
 "logprobs": [0.0, 0.0, -0.5, -1.25], "logprob_modes": [["raw", 2, 4]], "weight_versions": [[12, 2, 4]],
 "reward": 1.0, "call_ids": ["c0ffee"],
 "finish_reason": "stop", "truncated": false, "metadata": {}, "rollout_id": "first", "row_weight": 1.0,
 "policy": "", "media": []}
""")
ACCOUNTING: dict[str, Any] = json.loads("""
{"sampled_tokens": 2, "exported_tokens": 2, "quarantined": [], "dangling_calls": 0, "complete": true,
 "replayed_tokens": 0}
""")


class Trajectories(Body, json_schema_extra={"example": {"trajectories": [ROW], "accounting": ACCOUNTING}}):
    trajectories: list[TrajectoryView]
    accounting: AccountingView


class TraceRequest(Body):
    messages: list[dict[str, Any]]
    tools: None


class TraceChoice(Body):
    message: dict[str, Any]
    finish_reason: str | None


class TraceResponse(Body):
    choices: list[TraceChoice]


class TraceEntryShape(Body):
    request: TraceRequest
    response: TraceResponse
    prompt_token_ids: list[int]
    completion_token_ids: list[int]
    per_token_logps: list[float]
    """As long as completion_token_ids."""
    loss_mask: list[Literal[0, 1]]
    """Over prompt and completion; 1: trained in this entry alone."""
    reward: float | None
    """Null: it has none, which is not 0."""
    metadata: dict[str, Any]
    """node_id (the call's id), trajectory_id, role, agent, model, sampling_params, weight_versions, media."""


ENTRY: dict[str, Any] = json.loads("""
{"request": {"messages": [{"role": "user", "content": "Say hello."}], "tools": null},
 "response": {"choices": [{"message": {"role": "assistant", "content": "Hello."}, "finish_reason": "stop"}]},
 "prompt_token_ids": [101, 102], "completion_token_ids": [7, 8], "per_token_logps": [-0.5, -1.25], "loss_mask": [0, 0, 1, 1],
 "reward": 1.0, "metadata": {"node_id": "c0ffee", "role": "main", "weight_versions": [[12, 0, 2]]}}
""")


class TraceEntries(Body, json_schema_extra={"example": {"session_id": "first", "entries": [ENTRY]}}):
    session_id: str
    entries: list[TraceEntryShape]


MOST_TRACE_IDS = 2**24
"""Ids in one trace, whose prompts repeat what came before: about 100 MB as JSON."""


@router.get(
    "/calls",
    dependencies=[Depends(require_owner)],
    description="In the order they were recorded, followed by those in flight. With n > 1 every choice is a separate call. "
    + ENCODINGS,
    responses={200: {"model": CallPage, "description": "a page"}},
)
async def list_calls(
    request: Request, services: Served, session_id: SessionId, cursor: PageCursor = None, limit: PageSize = 100
) -> Response:
    state = await load_session(services, session_id)
    records, delivered, intents = await asyncio.gather(
        services.sessions.load_records(session_id),
        services.sessions.load_delivered(session_id),
        services.sessions.load_intents(session_id),
    )
    form = choose_form(request)
    in_flight = () if state.status in ENDED else await services.peers.in_flight(intents)
    start = CallsCursor.parse(cursor)

    def encoded() -> Response:
        page, following = rows.calls_as_wire(records, delivered, intents, in_flight, start, limit, form.arrays)
        return encode_response({"calls": encode_each(page, form), "cursor": following}, form)

    return await asyncio.to_thread(encoded)


@router.get(
    "/trajectories",
    dependencies=[Depends(require_owner)],
    description=f"With the accounting of every sampled token: sampled = exported + quarantined. {ENCODINGS}",
    responses={200: {"model": Trajectories, "description": "the rows"}},
)
async def get_trajectories(
    request: Request,
    services: Served,
    session_id: SessionId,
    builder: Annotated[
        str | None,
        Query(
            description="`merged`: one row per branch; `per_call`: one row per call; or a custom builder. Default: the service's setting."
        ),
    ] = None,
) -> Response:
    state = await load_session(services, session_id)
    built = await rows.session_rows(services, state, builder)
    form = choose_form(request)

    def encoded() -> Response:
        wire = encode_each((encode_row(row, arrays=form.arrays) for row in built.rows), form)
        return encode_response({"trajectories": wire, "accounting": encode_accounting(built.accounting)}, form)

    return await asyncio.to_thread(encoded)


@router.get(
    "/trace_entries",
    dependencies=[Depends(require_owner)],
    responses={
        200: {"model": TraceEntries, "description": "the entries"},
        413: {"description": "the trace would be too long: read the trajectories (`request_too_large`)"},
    },
)
async def get_trace_entries(services: Served, session_id: SessionId) -> Response:
    """The calls that its trajectories train, each once, as OpenEnv's `TraceEntry`s: with the whole prompt, and the loss mask of the
    trajectory that trains it. Those of the main agent come last. Close the session first: until then the masks may change."""
    state = await load_session(services, session_id)
    built = await rows.session_rows(services, state)
    # More than there are: a call's prompt is no longer than the row that it is in.
    if sum(len(row.token_ids) * len(row.call_ids) for row in built.rows) > MOST_TRACE_IDS:
        raise TooLarge(
            f"the trace of session {session_id} may have more than {MOST_TRACE_IDS} ids: read its trajectories instead"
        )
    # Afterwards: it has at least the calls that the rows have.
    records = await services.sessions.load_records(session_id)

    def encoded() -> Response:
        entries = trace_entries(rows.every_call_as_wire(records, (), (), ()), built.rows)
        return encode_response({"session_id": session_id, "entries": encode_each(entries, Encoding.JSON)}, Encoding.JSON)

    return await asyncio.to_thread(encoded)
