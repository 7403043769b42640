"""SampledChoice: one choice of vLLM's generate endpoint, put together from one answer or from the events of a stream."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from proxy.engine.base import Job, Sampled, at, check_entries, spoken
from proxy.engine.details import PromptLogprobs, details_of
from proxy.engine.generated import Usage, Version, spans_of
from proxy.engine.live_text import LiveText
from proxy.engine.replica import Replica
from proxy.engine.wire import Told


class BareLogprob(msgspec.Struct, gc=False):
    """As much of an entry as a record needs."""

    token_id: int
    logprob: float | None = None


class Logprob(BareLogprob):
    """A whole entry, for a harness that asked for logprobs or a trainer that wants the alternatives."""

    rank: int | None = None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


_logprob: Callable[[BareLogprob], float | None] = attrgetter("logprob")
_token_id: Callable[[BareLogprob], int] = attrgetter("token_id")


class _Top(msgspec.Struct):
    token_id: int
    logprob: float | None = None


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
    routed_experts: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the sampled ids say: a chat message without minted ids, and chat-shaped logprobs where they were asked for."""

    message: dict[str, Any]
    logprobs: Sequence[Mapping[str, Any]] | None = None


class Generated(Told):
    """A whole answer or an event of a stream."""

    choices: list[ChoicePiece] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _BareLogprobs(msgspec.Struct):
    content: list[BareLogprob] | None = None


class _BarePiece(ChoicePiece):
    logprobs: _BareLogprobs | None = None  # type: ignore[assignment]


class _BarelyGenerated(Generated):
    choices: list[_BarePiece] = msgspec.field(default_factory=list)  # type: ignore[assignment]


def answer_type(job: Job) -> type[Generated]:
    """What an answer is decoded as: the alternatives of each token only where somebody looks at them."""
    return Generated if job.wanted.top_logprobs or job.request.top_logprobs is not None else _BarelyGenerated


class SampledChoice:
    """`live` tells its text on the way."""

    def __init__(self, index: int, live: bool) -> None:
        self.index = index
        self.heard = False
        self.token_ids: list[int] = []
        self.entries: list[Logprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._versions: list[Version] = []
        self._routed_experts: str | None = None
        self.live = LiveText(index) if live else None

    def add(self, piece: ChoicePiece) -> None:
        new = piece.token_ids or []
        self.token_ids.extend(new)
        if piece.logprobs and piece.logprobs.content:
            self.entries.extend(piece.logprobs.content)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason
        self._versions.extend(piece.weight_versions or ())
        self._routed_experts = piece.routed_experts or self._routed_experts
        if self.live is not None:
            self.live.take(spoken(new, self.finish_reason, self.stop_reason))

    @property
    def spoken(self) -> list[int]:
        """The ids to be derendered, which would spell the stop token out."""
        return spoken(self.token_ids, self.finish_reason, self.stop_reason)

    def shown(self, job: Job) -> list[Logprob]:
        """The entries as a harness sees them, which may have asked for fewer alternatives than the engine was asked for."""
        if not job.wanted.top_logprobs:
            return self.entries
        most = max(job.request.top_logprobs or 0, 1)
        return [
            msgspec.structs.replace(entry, top_logprobs=msgspec.Raw(msgspec.json.encode(_tops(entry)[:most])))
            for entry in self.entries
        ]

    def sampled(self, replica: Replica, job: Job, parsed: Parsed, prompt_logprobs: PromptLogprobs | None) -> Sampled:
        """Raises EngineFailed when the logprobs are of other tokens."""
        assert job.prompt_ids is not None
        check_entries(self.index, self.token_ids, list(map(_token_id, self.entries)))
        tops = None
        if job.wanted.top_logprobs:
            told = (msgspec.json.decode(entry.top_logprobs, type=list[_Top]) for entry in self.entries)
            tops = [[(top.token_id, top.logprob) for top in entry if top.logprob is not None] for entry in told]
        return Sampled(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=list(map(_logprob, self.entries)),
            spans=spans_of(replica, self._versions),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            message=parsed.message,
            logprob_content=parsed.logprobs,
            details=details_of(
                job.wanted,
                job.prompt_ids,
                len(self.token_ids),
                tops=tops,
                prompt_logprobs=prompt_logprobs,
                routed_experts=self._routed_experts,
            ),
        )


def _tops(entry: Logprob) -> list[msgspec.Raw]:
    return msgspec.json.decode(entry.top_logprobs, type=list[msgspec.Raw])


def gather(choices: Sequence[SampledChoice], pieces: Sequence[ChoicePiece]) -> list[SampledChoice]:
    """The choices that got something."""
    for piece in pieces:
        at(choices, piece.index).add(piece)
    return [choices[piece.index] for piece in pieces]
