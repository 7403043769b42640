"""The dialects of one service, by name, and which of them can do more than answer calls."""

from __future__ import annotations

from proxy.dialects.base import Counts, Dialect, Lists
from proxy.dialects.chat import ChatDialect
from proxy.dialects.completions import CompletionsDialect
from proxy.dialects.gemini import GeminiDialect
from proxy.dialects.messages import MessagesDialect
from proxy.dialects.responses import ResponsesDialect
from proxy.settings import Settings


class Dialects:
    def __init__(self, settings: Settings) -> None:
        later = settings.later_system_role
        self._chat = ChatDialect()
        self._messages = MessagesDialect(later)
        self._gemini = GeminiDialect()
        self.responses = ResponsesDialect(later)
        self._all: dict[str, Dialect] = {
            dialect.name: dialect
            for dialect in (self._chat, CompletionsDialect(), self.responses, self._messages, self._gemini)
        }
        self._lists: dict[str, Lists] = {"chat": self._chat, "messages": self._messages, "gemini": self._gemini}
        self._counts: dict[str, Counts] = {
            "messages": self._messages,
            "responses": self.responses,
            "gemini": self._gemini,
        }

    def __getitem__(self, name: str) -> Dialect:
        return self._all[name]

    def lists(self, name: str) -> Lists:
        return self._lists[name]

    def counts(self, name: str) -> Counts:
        return self._counts[name]
