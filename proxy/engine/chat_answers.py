"""What an OpenAI-compatible server answers to a model call, whole or in chunks, and how that is put together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from proxy.dialects.base import Delta
from proxy.engine.assembly import Assembly
from proxy.engine.details import PromptLogprobs
from proxy.engine.id_text import IdText
from proxy.engine.wire import Told
from proxy.errors import EngineFailed
from reconstruct.errors import IdOutOfRange
from reconstruct.records import Ids

_NOTHING = msgspec.Raw()
_NONE = (b"", b"null", b"[]")
"""How an engine that tells no prompt ids writes them. Others are read only where they differ from those of the call before."""


class Logprobs(msgspec.Struct):
    """Of chat completions (`content`), or of completions (the rest)."""

    content: list[dict[str, Any]] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    @property
    def entries(self) -> list[dict[str, Any]]:
        """In the chat shape."""
        if self.content is not None:
            return self.content
        tops = self.top_logprobs or [None] * len(self.tokens)
        try:
            return [_entry(*told) for told in zip(self.tokens, self.token_logprobs, tops, strict=True)]
        except ValueError as error:
            raise EngineFailed("the engine's logprobs are not of one length") from error


class Choice(msgspec.Struct):
    index: int = 0
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: str | None = None


class PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: PromptTokensDetails | None = None


class Answer(Told):
    choices: list[Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    prompt_logprobs: PromptLogprobs | None = None


class Seen:
    """What the answer, or its chunks so far, told beside its choices."""

    def __init__(self, id_text: IdText) -> None:
        self.prompt_ids: Ids | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.usage: Usage | None = None
        self._id_text = id_text

    def take(self, told: Answer | Choice) -> None:
        """Raises EngineFailed for prompt ids that are none."""
        self.prompt_logprobs = self.prompt_logprobs or told.prompt_logprobs
        if self.prompt_ids is not None or (text := bytes(told.prompt_token_ids)) in _NONE:
            return
        try:
            self.prompt_ids = self._id_text.read(text)
        except (msgspec.DecodeError, IdOutOfRange) as error:
            raise EngineFailed(f"the engine's prompt ids are none: {error}") from error


class Gathered:
    """One choice put together from an answer or from the chunks of a stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.heard = False
        self.token_ids: list[int] | None = None
        self.entries: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.routed_experts: str | None = None
        self.assembly = Assembly(index)

    def add(self, choice: Choice) -> Delta:
        """Take in one piece; returns it as the harness sees it, tool-call ids still the engine's."""
        if choice.token_ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids.extend(choice.token_ids)
        entries = choice.logprobs.entries if choice.logprobs else []
        self.entries.extend(entries)
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
        self.routed_experts = choice.routed_experts or self.routed_experts
        piece = {"content": choice.text} if choice.text is not None else choice.delta or choice.message or {}
        delta = self.assembly.add(piece)
        delta.logprobs, delta.token_ids = entries, choice.token_ids or ()
        return delta


def _entry(token: str, logprob: float | None, top: Mapping[str, float] | None) -> dict[str, Any]:
    tops = [{"token": name, "logprob": value} for name, value in (top or {}).items()]
    return {"token": token, "logprob": logprob, "top_logprobs": tops}
