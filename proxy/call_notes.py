"""What is noted of one call while it is answered, for its log line and its trace. Only where either is wanted.

The notes are the call's own: set when its request arrives, and found again by whatever works for it, in whichever task.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, MutableMapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from proxy.errors import VerbatimError

if TYPE_CHECKING:
    from proxy.dialects.base import Reply
    from proxy.turn import Turn


class CallTrace(Protocol):
    """The spans of one call. A step lasts until the next one begins, or the call ends."""

    trace_id: str

    def step(self, name: str, attributes: Mapping[str, str] | None = None) -> None: ...

    def event(self, name: str) -> None: ...

    def carry(self, headers: MutableMapping[str, str]) -> None:
        """Add what lets another service's spans be children of the step."""
        ...

    def end(self, attributes: Mapping[str, str | int | float | list[str]], error: str) -> None:
        """`error`: its code, "" where there was none."""
        ...


@dataclass(slots=True, eq=False)
class CallNotes:
    """`turn` is None while the request is not known to be a model call, or was refused as one."""

    headers: Mapping[str, str]
    dialect: str
    trace: CallTrace | None = None
    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    turn: Turn | None = None
    reply: Reply | None = None
    error: VerbatimError | None = None
    http_status: int | None = None
    """None where no answer was begun."""

    def step(self, name: str, attributes: Mapping[str, str] | None = None) -> None:
        if self.trace is not None:
            self.trace.step(name, attributes)

    def began(self) -> None:
        """The engine sampled the first token."""
        self.first_token = time.perf_counter()
        if self.trace is not None:
            self.trace.event("first_token")

    def forget(self) -> None:
        """Let go of everything: what the call started and outlives it, the watch of an engine that failed say, holds its notes."""
        self.turn = self.reply = self.error = self.trace = None

    @property
    def outcome(self) -> str:
        """finished, aborted (cut by the harness, a close or a stop), failed, or refused: it never became a call."""
        if self.turn is None:
            return "refused"
        if self.turn.running.cut.is_set():
            return "aborted"
        return "finished" if self.reply is not None else "failed"

    @property
    def code(self) -> str:
        """The error's code, "" where there was none."""
        if self.error is not None:
            return self.error.code
        return "" if self.reply is not None or (self.http_status or 500) < 500 else VerbatimError.code


NOTES: ContextVar[CallNotes | None] = ContextVar("notes", default=None)
