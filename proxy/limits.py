"""Bounds of one process that no operator has had a reason to set. Tests give others: `create_app(settings, limits=...)`."""

from __future__ import annotations

from dataclasses import dataclass, field

from proxy.images import ImageBounds
from proxy.store.connection import REPLY_SECONDS


@dataclass(frozen=True, slots=True)
class ProcessLimits:
    engine_timeout_seconds: float = 3600.0
    """How long an engine may send nothing during a call. A whole reply of 100,000 tokens takes an hour at 30 tokens a second; an engine
    that hangs is found sooner, by `engine_stall_seconds`."""
    engine_watch_seconds: float = 3.0
    """Interval between resolving watched names and looking for engines added at run time: one command and one lookup each."""
    redis_timeout_seconds: float = REPLY_SECONDS
    body_timeout_seconds: float = 120.0
    """How long the body of a request may take to arrive: 64 MiB at 5 Mbit/s."""
    body_room_bytes: int = 256 * 2**20
    """Memory for the request bodies of calls in flight, four of the largest; further calls wait, and get 429 after `body_timeout_seconds`.
    Bodies up to 256 KiB never wait."""
    body_room_per_session_bytes: int = 64 * 2**20
    """The same for one session: one of the largest."""
    images: ImageBounds = field(default_factory=ImageBounds)
    image_cache_bytes: int = 256 * 2**20
    """Memory for images that were used last, at 1 MB a screenshot those of 250 turns; others are read from the store when a call needs
    them."""
    session_cache: int = 4096
    """Session trees kept in memory. Their bytes are bounded first (`session_cache_bytes`); this bounds the search through small ones."""
    session_memo: bool = True
    """Whether a call reads only what its body adds to the session's last ones. Off, each is read in full: the same tokens, more slowly."""


USUAL = ProcessLimits()
