"""SessionStore: sessions and the records of their calls, as the rest of the service sees them.

All keys of a session share one hash tag. Records are opaque bytes here (`reconstruct.codec` writes and reads them). The path of
one call is two round trips: `begin` (snapshot + new records + intent) and `commit`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.store.groups import GroupRule
from reconstruct.roles import RoleRule


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """What is fixed when a session is created. `key_hash` is sha256 of the session's API key; the key is not stored."""

    session_id: str
    key_hash: bytes
    created_at: float
    task_id: str | None = None
    group_id: str | None = None
    group_size: int = 1
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    group_rule: GroupRule | None = None
    trained: bool = True
    """False: no trainer ever gets it, whatever its reward, and nobody counts it among the groups that wait for one."""
    echo_policy: str = "strict"
    """What becomes of a reply that its harness replays with an edit: strict: a branch; minted: the reply as it was sampled, where an id
    that was minted into it proves which one is meant."""
    role_rules: tuple[RoleRule, ...] = ()
    """What its harness's definition declares of the roles of its calls."""
    max_calls: int | None = None
    max_completion_tokens: int | None = None
    max_total_tokens: int | None = None
    """Its budget (`proxy.budget`): calls, sampled tokens, and tokens of prompts and replies; None: any number."""


@dataclass(frozen=True, slots=True)
class Unserved:
    """A call that the service or its engine failed. `at` is when its harness was told, in epoch seconds; `code` is the error's."""

    at: float
    call_id: str
    code: str
    message: str


@dataclass(frozen=True, slots=True)
class SessionState:
    """A session as it stands. `status` is open, closing, completed, failed, timeout or cancelled; or restoring while an import
    of it has not ended."""

    info: SessionInfo
    status: str = "open"
    calls: int = 0
    reward: float | None = None
    per_call: Mapping[str, float] = field(default_factory=dict)
    per_branch: Mapping[str, float] = field(default_factory=dict)
    reward_metadata: Mapping[str, Any] = field(default_factory=dict)
    error: str | None = None
    closed_at: float | None = None
    updated_at: float = 0.0
    unserved: Unserved | None = None
    """The last one, of which there may be no record."""


@dataclass(frozen=True, slots=True)
class Intent:
    """Written before the engine is asked: without a result it becomes a dangling call after a crash.

    `process` is who asked; empty when that process has given the call up. A call is under way while its process lives."""

    call_id: str
    parent_id: str | None
    digest: bytes
    replica: str
    started_at: float
    process: str = ""


@dataclass(frozen=True, slots=True)
class Begun:
    """Answer of `begin`. `status` is the session's, or "missing", or "full". `accepted` is true when the intent was written:
    the session is open and `known_calls` was current. Otherwise `records` holds the calls the caller did not know.

    `created_at` is the session's: a cached tree of another `created_at` belongs to a deleted session of the same id.
    "missing" is also the answer when the caller claims to know more calls than there are (the same case)."""

    status: str
    accepted: bool
    records: Sequence[bytes] = ()
    created_at: float = 0.0


class SessionStore(Protocol):
    async def ping(self) -> None:
        """Returns when the store answers and takes records; raises `StoreUnavailable` otherwise."""
        ...

    async def create(self, info: SessionInfo) -> bool:
        """False when another session of that id exists. Repeating the same creation is a no-op and True."""
        ...

    async def load(self, session_id: str) -> SessionState | None: ...

    async def listing(
        self, *, status: str | None, group_id: str | None, limit: int, cursor: str | None
    ) -> tuple[list[SessionState], str | None]:
        """Newest first, with the cursor of the next page or None."""
        ...

    async def delete(self, session_id: str) -> bool: ...

    async def begin(self, session_id: str, known_calls: int, intent: Intent, most_bytes: int = 0) -> Begun:
        """Write the intent. The status of a session whose calls hold `most_bytes` (0: any number) or more is "full"."""
        ...

    async def commit(self, session_id: str, intent_id: str, records: Mapping[str, bytes], size_bytes: int = 0) -> int:
        """Append `records` (call_id -> bytes, all or none), drop the intent, return the session's number of calls. `size_bytes` is what
        they hold before they are compressed.

        Repeating a commit is a no-op. A call_id that exists with other bytes raises `Conflict`; a session frozen or deleted
        meanwhile raises `Conflict` ("closing" still takes the calls that were in flight)."""
        ...

    async def drop_intent(self, session_id: str, intent_id: str) -> None:
        """The engine refused the call: the tree is as it was."""
        ...

    async def note_unserved(self, session_id: str, unserved: Unserved) -> None:
        """Kept with the session unless that is closed or knows of a later one."""
        ...

    async def disown(self, running: Container[str]) -> None:
        """Settle the intents of this process whose calls are not `running` any more, though the store could not be told when
        they ended: those that came to nothing are taken away, the others are nobody's from now on, and so dangling."""
        ...

    async def mark_delivered(self, session_id: str, call_ids: Sequence[str]) -> None: ...

    async def delivered(self, session_id: str) -> set[str]: ...

    async def records(self, session_id: str, start: int = 0, stop: int = -1) -> list[bytes]:
        """Records in commit order; indexes as in LRANGE."""
        ...

    async def intents(self, session_id: str) -> list[Intent]: ...

    async def set_reward(
        self,
        session_id: str,
        reward: float | None,
        per_call: Mapping[str, float],
        per_branch: Mapping[str, float],
        metadata: Mapping[str, Any],
    ) -> SessionState:
        """A reward of None keeps the one there. Raises `NotFound`, or `Conflict` once the session was leased."""
        ...

    async def mark_leased(self, session_id: str) -> SessionState | None:
        """The state that a trainer is given; from now on the reward is fixed. None when the session is gone."""
        ...

    async def begin_close(self, session_id: str) -> SessionState:
        """open -> closing: no new call begins. Raises `NotFound`; on a closed session returns its state."""
        ...

    async def close(
        self, session_id: str, status: str, reward: float | None, error: str | None, closed_at: float
    ) -> SessionState:
        """closing -> frozen with `status`. Repeating it with the same status is a no-op; another status raises `Conflict`."""
        ...

    async def unclosed(self, before: float, limit: int = 100) -> Sequence[str]:
        """Sessions not closed and last known to be active before that time, longest ago first."""
        ...

    async def seen(self, session_id: str, at: float | None) -> None:
        """Note when the session was active; None: it is closed or gone."""
        ...

    async def expire(self, session_id: str, idle_since: float, closing_since: float, intents: int) -> bool:
        """open -> closing, if the session was not active after `idle_since` and has `intents` intents. Also taken over is a
        session whose closing somebody left undone at `closing_since`. True for one caller only, who then closes it."""
        ...
