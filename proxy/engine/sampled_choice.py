"""SampledChoice: one choice of vLLM's generate endpoint, put together from one answer or from the events of a stream."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.engine.base import Sampled, at, spoken
from proxy.engine.generated import Usage, Version, spans_of
from proxy.engine.live_text import LiveText
from proxy.engine.replica import Replica
from proxy.engine.wire import Told


class Logprob(msgspec.Struct):
    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


class Logprobs(msgspec.Struct):
    content: list[Logprob] | None = None


class ChoicePiece(msgspec.Struct):
    """What an answer or an event says of one choice."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Version] | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the sampled ids say: a chat message without minted ids, and chat-shaped logprobs where they were asked for."""

    message: dict[str, Any]
    logprobs: Sequence[Mapping[str, Any]] | None = None


class Generated(Told):
    """A whole answer or an event of a stream."""

    choices: list[ChoicePiece] = msgspec.field(default_factory=list)
    usage: Usage | None = None


class SampledChoice:
    """`live` tells its text on the way."""

    def __init__(self, index: int, live: bool) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.entries: list[Logprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._versions: list[Version] = []
        self.live = LiveText(index) if live else None

    def add(self, piece: ChoicePiece) -> None:
        new = piece.token_ids or []
        self.token_ids.extend(new)
        if piece.logprobs and piece.logprobs.content:
            self.entries.extend(piece.logprobs.content)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason
        self._versions.extend(piece.weight_versions or ())
        if self.live is not None:
            self.live.take(spoken(new, self.finish_reason, self.stop_reason))

    @property
    def spoken(self) -> list[int]:
        """The ids to be derendered, which would spell the stop token out."""
        return spoken(self.token_ids, self.finish_reason, self.stop_reason)

    def sampled(self, replica: Replica, parsed: Parsed) -> Sampled:
        return Sampled(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=[entry.logprob for entry in self.entries],
            spans=spans_of(replica, self._versions),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            message=parsed.message,
            logprob_content=parsed.logprobs,
        )


def gather(choices: Sequence[SampledChoice], pieces: Sequence[ChoicePiece]) -> list[SampledChoice]:
    """The choices that got something."""
    for piece in pieces:
        at(choices, piece.index).add(piece)
    return [choices[piece.index] for piece in pieces]
