"""One call in phases: Arrival (read, and not a call yet), Admitted (it has ids and can be cut), Placed (at a replica, with its parent and
its prompt), Sampled (with what the engine made of it). All but the first are frozen, and have all that the next step needs."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from proxy.call.draft import Draft
from proxy.call.session import Chained, ReplayedHistory, Session
from proxy.dialects.base import Delta, FirstToken, PromptReady, Reply, Request
from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.reply import EngineChoice
from proxy.engine.replica import Replica
from proxy.errors import VerbatimError
from proxy.store.states import NO_SHARE, Share
from proxy.timeline import CancelScope, Timeline
from reconstruct.media import Media, Ranges
from reconstruct.records import Call, Ids
from reconstruct.roles import Purpose

Emit = Callable[[PromptReady | FirstToken | Sequence[Delta]], None]
"""Takes what the harness may see: PromptReady once the prompt is known, FirstToken, and deltas."""


class RecordedAnswer(Protocol):
    """What answers a call without an engine."""

    async def give(self, call: Admitted, emit: Emit) -> Reply:
        """The reply, at its pace. Raises VerbatimError where there is to be none."""
        ...


class Planner(Protocol):
    """How the prompt of a request comes about. `param` is the request's field that it is made of; `forges_tokens`: control tokens in its
    texts were written by nobody who may."""

    param: str
    forges_tokens: bool

    def find_parent(self, session: Session, request: Request, policy: str = "") -> Continuation:
        """The call that `request`, which `policy` is to answer, continues."""
        ...

    def check(self, request: Request, found: Continuation, kinds: EngineKinds, kind: EngineKind) -> None:
        """Raises RequestError for what a kind that takes ids cannot carry."""
        ...

    async def plan(
        self, session: Session, request: Request, found: Continuation, replica: Replica, kinds: EngineKinds, *, retain: bool
    ) -> tuple[Continuation, TokenPlan]:
        """The ids to sample after, and what the request continues according to them; `retain`: thinking that a template drops is kept.
        Raises RequestError for a prompt that the engine does not take."""
        ...


class Arrival(msgspec.Struct):
    """A request that was read. Hooks may write here, and only here: `request`, what is `withheld` until the call is sampled, `marks`, and
    an answer that was `recorded` before, with the ids and the start that its calls had then (otherwise ids are minted)."""

    draft: Draft
    request: Request
    headers: Mapping[str, str]
    digest: bytes
    """Of the body."""
    purpose: Purpose
    marks: Mapping[str, str]
    is_retry: bool = False
    withheld: bool = False
    recorded: RecordedAnswer | None = None
    call_ids: list[str] = []
    started_at: float | None = None


class Hooks(msgspec.Struct, frozen=True):
    """What the hooks of one call override, in their order (see `proxy.call.hooks`)."""

    admit: tuple[Callable[[Arrival], Awaitable[None]], ...] = ()
    before_sampling: tuple[Callable[[Draft, Request, Replica], Awaitable[None]], ...] = ()
    after_sampling: tuple[Callable[[Sampled], Awaitable[Sampled]], ...] = ()
    before_commit: tuple[Callable[[Sampled], Awaitable[None]], ...] = ()
    after_commit: tuple[Callable[[Admitted, Sequence[Call]], None], ...] = ()


NO_HOOKS = Hooks()


class Admitted(msgspec.Struct, frozen=True):
    """A call. `started_at` is wall-clock time, `clock` the monotonic time of the same moment. `asked` is the request as the harness made
    it, whose choices it gets; `request` may ask for more. `sampling` is what was asked for: the harness's parameters under the session's
    overrides. There is one call id per choice; the first is the call's, under which its intent is stored."""

    session_id: str
    call_id: str
    session: Session
    draft: Draft
    asked: Request
    request: Request
    digest: bytes
    call_ids: list[str]
    scope: CancelScope
    started_at: float
    clock: float
    timeline: Timeline
    sampling: Mapping[str, Any]
    marks: Mapping[str, str]
    purpose: Purpose
    planner: Planner
    withheld: bool = False
    recorded: RecordedAnswer | None = None
    hooks: Hooks = NO_HOOKS


class Continuation(msgspec.Struct, frozen=True):
    """Where a request stands: its chain, whose last link is its fingerprint, and the call whose reply is its message number `reply_at`
    (None: a root).

    `render_key` names what the rendering of the request depends on beside its messages (see reconstruct.messages.render_key).
    `other_render_key`: the parent's was another, so that a rendering is to prove that it makes no difference.

    `nearest` is the call whose whole request is the longest known beginning of this one, and `shared_messages` how many messages that is: a
    retry or another sample when it is all of them, an edited history when it goes on otherwise.
    """

    root: bytes
    chain: list[bytes]
    parent: Call | None = None
    reply_at: int = -1
    projection: str = ""
    nearest: str | None = None
    shared_messages: int = 0
    render_key: bytes = b""
    other_render_key: bool = False
    replay: ReplayedHistory | None = None
    """How the request replays the parent and all calls before it."""
    chained: Chained | None = None
    base: str | None = None
    """The call on whose ids the prompt of a request without a parent is stored if `nearest` is None; None: the latest."""


class TokenPlan(msgspec.Struct, frozen=True):
    """The ids to sample after, why they are a fresh rendering (None: they extend the parent), and the generate body.
    `rendering` is what the template makes of the whole request, `keeps_text_apart` whether control tokens in texts are text in it, `media`
    the ranges of the images."""

    prompt_ids: Ids
    branch_reason: str | None
    rendering: Ids
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    keeps_text_apart: bool = False
    media: Ranges = ()


class Placed(msgspec.Struct, frozen=True):
    """A call at its replica. `plan` is None where the engine renders the messages, or plans. `sampling` is what the engine is asked for,
    `granted` what the call reserved of the session's budget."""

    call: Admitted
    replica: Replica
    kind: EngineKind
    found: Continuation
    plan: TokenPlan | None
    sampling: Mapping[str, Any]
    granted: Share = NO_SHARE


class Sampled(msgspec.Struct, frozen=True):
    """A call that was sampled, the first choices being those that the harness gets. `placed` has the prompt and the parameters in the end.
    `prompt_ids` are those sampled after, None if the engine did not tell; `media` the images in them, `placeholders` the ids that stand
    for these. `is_broken`: the reply broke off. `error` is what the harness gets in its place.

    `marks` and `reasons` hold, by a choice's index, what its record is marked with and why it is not to be trained, whatever its tokens
    are."""

    call: Admitted
    placed: Placed
    choices: tuple[EngineChoice, ...]
    prompt_ids: Ids | None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    media: tuple[Media, ...] = ()
    placeholders: list[int] = []
    is_broken: bool = False
    error: VerbatimError | None = None
    marks: Mapping[int, Mapping[str, str]] = {}
    reasons: Mapping[int, str] = {}
