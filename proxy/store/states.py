"""Sessions as they are stored: the fields fixed when one is created, its state and its intents."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, cast

from contract.sessions import LastEvents, OpeningFields, SessionProgress, SessionStatus, SettledFields, TokenSums, Unserved
from proxy.errors import Unavailable
from proxy.store.keys import pack_versioned, unpack, unpack_versioned

FEEDBACK = "feedback:"
"""Begins the name, before a call's id, under which people judge that call. No judge of the settings has a colon in its name."""


FEATURES: Mapping[str, Callable[[SessionInfo], bool]] = {
    "budget": lambda info: info.has_budget,
    "echo": lambda info: info.echo_policy != "strict",
    "fork": lambda info: info.replay is not None,
    "lookahead": lambda info: info.lookahead is not None,
    "roles": lambda info: bool(info.role_rules),
    "scores": lambda info: bool(info.scores),
    "untrained": lambda info: not info.trained,
}
"""What a process has to understand of a session, and which sessions need it: whoever adds a field that changes what a call or a row is
adds its feature. A build that does not know a feature refuses its sessions, for it would serve them as something else."""


@dataclass(frozen=True, slots=True)
class SessionInfo(SettledFields, OpeningFields):
    """The fields fixed when a session is created. `key_hash` is sha256 of the session's API key; the key is not stored. `needs`: the
    `FEATURES` that a process has to know to serve it, told by its other fields where they are not stored."""

    session_id: str
    key_hash: bytes
    created_at: float
    needs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        found = {name for name, has in FEATURES.items() if has(self)}
        object.__setattr__(self, "needs", tuple(sorted(found.union(self.needs))))

    def check_understood(self) -> None:
        """Raises Unavailable for a session that a newer build opened with what this one does not know."""
        if unknown := [name for name in self.needs if name not in FEATURES]:
            raise Unavailable(
                f"session '{self.session_id}' needs what this process does not know ({', '.join(unknown)}): a newer one serves it"
            )

    @property
    def has_budget(self) -> bool:
        return not (self.max_calls is self.max_completion_tokens is self.max_total_tokens is None)


def pack_info(info: SessionInfo) -> bytes:
    """Without what is empty: each process that serves the session loads it, and most sessions set few fields."""
    given = {each.name: getattr(info, each.name) for each in fields(info)}
    return pack_versioned({name: value for name, value in given.items() if value not in (None, (), {})})


@dataclass(frozen=True, slots=True)
class Verdicts:
    """What one judge says of a session's calls, by their ids. `error`: why it says nothing."""

    scores: Mapping[str, float]
    hints: Mapping[str, str]
    error: str = ""


@dataclass(frozen=True, slots=True)
class SessionState(SessionProgress, LastEvents):
    """A session as it stands. It is `restoring` during an import."""

    info: SessionInfo
    verdicts: Mapping[str, Verdicts] = field(default_factory=dict)
    """Of the judges that were asked. `per_call` has their means, where nothing else was said of a call."""
    accounting: TokenSums | None = None
    """Known once the session is closed and ready for its group."""


@dataclass(frozen=True, slots=True)
class Share:
    """Of a session's budget: calls, sampled tokens, and tokens of prompts and replies. None: any number."""

    calls: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None


NO_SHARE = Share()


@dataclass(frozen=True, slots=True)
class Intent:
    """Written before the engine samples. One that stays without a record is a dangling call.

    `process` asks the engine, and the call is in flight while that process lives; "" once the process has given the call up. Until then
    what the call reserved of the session's budget stands on it in the store (`SessionStore.begin`)."""

    call_id: str
    parent_id: str | None
    digest: bytes
    replica: str
    started_at: float
    process: str = ""


def parse_state(snapshot: Any) -> SessionState | None:
    flat, calls = snapshot
    if not flat:
        return None
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    verdicts = _read_verdicts(fields) if b"judged" in fields else {}
    hints = list_hints(verdicts)
    reward, error, closed_at = fields.get(b"reward"), fields.get(b"error"), fields.get(b"closed_at")
    return SessionState(
        info=unpack_versioned(fields[b"info"], SessionInfo),
        status=cast(SessionStatus, fields[b"status"].decode()),
        calls=calls,
        reward=None if reward is None else float(reward),
        per_call={**_mean_scores(verdicts), **_unpack_mapping(fields.get(b"per_call"))},
        per_branch=_unpack_mapping(fields.get(b"per_branch")),
        reward_metadata={
            **({"hints": hints} if (hints := list_hints(verdicts)) else {}),
            **_unpack_mapping(fields.get(b"reward_metadata")),
        },
        error=None if error is None else error.decode(),
        flag=fields[b"flag"].decode() if b"flag" in fields else None,
        note=fields[b"note"].decode() if b"note" in fields else None,
        closed_at=None if closed_at is None else float(closed_at),
        updated_at=float(fields[b"updated_at"]),
        unserved=unpack_versioned(fields[b"unserved"], Unserved) if b"unserved" in fields else None,
        replayed_at=float(fields[b"replayed_at"]) if b"replayed_at" in fields else None,
        scored=int(fields.get(b"scored", 0)),
        verdicts=verdicts,
        accounting=unpack_versioned(fields[b"accounting"], TokenSums) if b"accounting" in fields else None,
    )


_VERDICTS = b"verdicts:"


def _read_verdicts(fields: Mapping[bytes, bytes]) -> dict[str, Verdicts]:
    """What people say of calls is last."""
    named = {name[len(_VERDICTS) :].decode(): blob for name, blob in fields.items() if name.startswith(_VERDICTS)}
    ordered = sorted(named.items(), key=lambda item: (item[0].startswith(FEEDBACK), item[0]))
    return {name: unpack_versioned(blob, Verdicts) for name, blob in ordered}


def _mean_scores(verdicts: Mapping[str, Verdicts]) -> dict[str, float]:
    """By call: what people say of it, and otherwise the mean of the judges."""
    found: dict[str, list[float]] = {}
    for name, each in verdicts.items():
        for call_id, score in each.scores.items():
            found[call_id] = [score] if name.startswith(FEEDBACK) else [*found.get(call_id, ()), score]
    return {call_id: sum(scores) / len(scores) for call_id, scores in found.items()}


def list_hints(verdicts: Mapping[str, Verdicts]) -> dict[str, str]:
    """By call: what people say of it, and otherwise the last of the judges by name."""
    return {call_id: hint for each in verdicts.values() for call_id, hint in each.hints.items()}


def _unpack_mapping(blob: bytes | None) -> dict[str, Any]:
    return {} if blob is None else unpack(blob, dict[str, Any])
