"""The history of a request: its messages as a dialect hears them, and as a session has seen them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from reconstruct.messages import Digests


@dataclass(frozen=True, slots=True)
class Heard:
    """A chat message as a dialect read it. `minted` names the call whose reply it is, where an id that the service minted into
    something else than a tool call says so."""

    message: dict[str, Any]
    minted: str = ""


Read = Callable[[bytes], list[Heard]]
"""How a dialect reads one raw item of a history."""


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One message of the session's histories, decoded and digested once; requests share it. `minted`: the calls that ids in it
    name. `projections`: how it shows the reply of a call, by the call's id (see reconstruct.messages.projection); kept here, so that
    what was compared is forgotten with the message."""

    message: dict[str, Any]
    digests: Digests
    minted: tuple[str, ...] = ()
    projections: dict[str, str | None] = field(default_factory=dict, repr=False)
