"""Turn: one call on its way through the flow, and what is checked of it on entry."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proxy.call.inflight import Running
from proxy.call.plan import Continuation, TokenPlan
from proxy.call.tree import Draft, SessionTree
from proxy.dialects.base import Request
from proxy.dialects.catalogue import dialects
from proxy.engine.apis.base import EngineKinds
from proxy.engine.replica import Replica
from proxy.errors import ContextTooLong, RequestError
from proxy.timeline import CallClock
from reconstruct.messages import plain_content
from reconstruct.roles import Marks, Purpose, RoleRule, find_purpose


@dataclass(slots=True)
class Turn:
    """What is known of the call so far."""

    draft: Draft
    request: Request
    digest: bytes
    call_ids: list[str]
    running: Running
    started_at: float
    clock: float
    times: CallClock
    headers: Mapping[str, str]
    rules: Sequence[RoleRule]
    engine_seconds: float = 0.0
    found: Continuation | None = None
    plan: TokenPlan | None = None
    replica: Replica | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    asked: dict[str, Any] | None = None
    marks: dict[str, str] = field(default_factory=dict)
    _purpose: Purpose | None = None

    @property
    def tree(self) -> SessionTree:
        return self.draft.tree

    @property
    def session_id(self) -> str:
        return self.tree.info.session_id

    @property
    def purpose(self) -> Purpose:
        """What the call is for, by rules that may search its texts when it is first asked."""
        if self._purpose is None:
            marks = _marks_of(self.request, self.headers)
            self._purpose = find_purpose(marks, self.rules, self.tree.info.role_rules)
        return self._purpose

    def go_to(self, replica: Replica) -> None:
        """The call begins at this replica; what was planned for another one does not hold."""
        self.asked = self.sampling if self.asked is None else self.asked
        self.replica, self.plan, self.sampling = replica, None, dict(self.asked)
        self.running.ask_engine = None


def _marks_of(request: Request, headers: Mapping[str, str]) -> Marks:
    messages = request.history
    system = messages[0].message if messages[0].message.get("role") in ("system", "developer") else {}
    return Marks(headers, bool(request.tools), _text(system), _text(messages[-1].message))


def _text(message: Mapping[str, Any]) -> str:
    """The message's text as far as rules about prompts look at it."""
    content = plain_content(message.get("content"))
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part for part in parts if isinstance(part, str))


def fit_window(turn: Turn, prompt_length: int) -> None:
    """Clamp max_tokens to what the window leaves. Raises ContextTooLong when the prompt alone does not fit."""
    assert turn.replica is not None
    window = turn.replica.max_model_len
    if window is None:
        return
    room = window - prompt_length
    if room < 1:
        asked = "messages" if turn.request.prompt is None else "prompt"
        raise ContextTooLong(
            f"This model's maximum context length is {window} tokens. However, your {asked} resulted in "
            f"{prompt_length} tokens. Please reduce the length of the {asked}.",
            param=asked,
            tokens=prompt_length,
            window=window,
        )
    turn.sampling["max_tokens"] = min(turn.sampling.get("max_tokens") or room, room)


def refuse_media(request: Request, found: Continuation, kinds: EngineKinds) -> None:
    """Raise RequestError for content parts that the token path cannot carry. What it has carried before is not looked at again."""
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
