"""One call in phases: Turn (admitted), Planned (at a replica, with its parent and prompt), Sampled (with the engine's outcome).

Each phase is a frozen type that has all the next step needs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from proxy.call.plan import Continuation, TokenPlan
from proxy.call.recording import Recalled
from proxy.call.tree import Draft, SessionTree
from proxy.dialects.base import Request
from proxy.dialects.catalogue import dialects
from proxy.engine.apis.base import EngineKinds, Outcome
from proxy.engine.replica import Replica
from proxy.engine.wire.cancel_scope import CancelScope
from proxy.errors import ContextTooLong, RequestError
from proxy.store.sessions import Lookahead
from proxy.timeline import Timeline
from reconstruct.messages import plain_content
from reconstruct.records import Ids
from reconstruct.roles import Marks, Purpose


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that was admitted. `started_at` is wall-clock time, `clock` the monotonic time of the same moment. `sampling` is what
    was asked for: the harness's parameters under the session's overrides. There is one call id per choice. `recalled`: what a fork's
    recording makes of it; a call that is replayed has the ids and the start it had. With a `lookahead` the request asks for its
    candidates."""

    draft: Draft
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
    recalled: Recalled | None = None
    lookahead: Lookahead | None = None

    @property
    def shown(self) -> Request:
        """The request as the harness made it: of a lookahead's candidates it gets one."""
        return self.request if self.lookahead is None else replace(self.request, n=1)

    @property
    def tree(self) -> SessionTree:
        return self.draft.tree

    @property
    def session_id(self) -> str:
        return self.scope.session_id

    @property
    def call_id(self) -> str:
        """The first choice's, under which the call's intent is stored."""
        return self.scope.call_id


@dataclass(frozen=True, slots=True)
class Planned:
    """A call at its replica. `plan` is None where the engine renders the messages; `sampling` is what the engine is asked for, into
    which its kind may write what it reduced."""

    turn: Turn
    replica: Replica
    found: Continuation
    plan: TokenPlan | None
    sampling: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sampled:
    """A call that was sampled."""

    planned: Planned
    outcome: Outcome
    chosen: bool = False
    """Whether the first choice was chosen from the candidates of a lookahead."""

    @property
    def prompt_ids(self) -> Ids | None:
        """The ids that were sampled after; None if the engine did not tell."""
        plan = self.planned.plan
        return self.outcome.prompt_ids if plan is None else plan.prompt_ids

    @property
    def branch_reason(self) -> str | None:
        """Why the prompt is a fresh rendering where it was planned as one."""
        plan = self.planned.plan
        return None if plan is None else plan.branch_reason


def marks_of(request: Request, headers: Mapping[str, str]) -> Marks:
    """What rules about roles look at."""
    messages = request.history
    system = messages[0].message if messages[0].message.get("role") in ("system", "developer") else {}
    return Marks(headers, bool(request.tools), _text(system), _text(messages[-1].message))


def _text(message: Mapping[str, Any]) -> str:
    content = plain_content(message.get("content"))
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part for part in parts if isinstance(part, str))


def fit_window(request: Request, replica: Replica, sampling: dict[str, Any], prompt_length: int) -> None:
    """Clamp max_tokens to what the window leaves. Raises ContextTooLong when the prompt alone does not fit."""
    window = replica.max_model_len
    if window is None:
        return
    room = window - prompt_length
    if room < 1:
        field = "messages" if request.prompt is None else "prompt"
        raise ContextTooLong(
            f"This model's maximum context length is {window} tokens. However, your {field} resulted in "
            f"{prompt_length} tokens. Please reduce the length of the {field}.",
            param=field,
            tokens=prompt_length,
            window=window,
        )
    sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)


def refuse_media(request: Request, found: Continuation, kinds: EngineKinds) -> None:
    """Raise RequestError for content parts that the token path cannot carry. What it has carried before is not checked again."""
    carried = found.reply_at + 1 if found.parent is not None and kinds.takes_ids(found.parent.api) else 0
    for position in range(carried, len(request.history)):
        content = request.history[position].message.get("content")
        for part in content if isinstance(content, list) else ():
            kind = part.get("type", "text") if isinstance(part, dict) else "text"
            if kind not in ("text", "input_text", "output_text", "refusal", "thinking"):
                raise _media_refused(request, position, kind)


def _media_refused(request: Request, position: int, kind: str) -> RequestError:
    role = request.history[position].message.get("role")
    reason = f"has a part of type '{kind}', but the engine of model '{request.model}' takes text only"
    dialect = dialects()[request.dialect]
    if not dialect.is_one_to_one:
        listed = dialect.history_field
        return RequestError(f"'{listed}': message {position + 1} as the model sees them ({role}) {reason}", param=listed)
    return RequestError(f"messages[{position}] ({role}) {reason}", param=f"messages[{position}].content")
