"""What every dialect translates to and from: one canonical request, one reply, and the events of a stream.

A dialect is stateless. `parse` turns a body into a `Request` whose messages are OpenAI chat messages; `render` turns a `Reply`
into the body of an unstreamed answer; `open_stream` gives a renderer that is fed `Delta`s as text becomes certain and closed
with the `Reply`, which emits whatever no delta carried. So one assembler serves streamed and whole replies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.errors import VerbatimError
from proxy.trees import Seen

See = Callable[[bytes, Callable[[bytes], dict[str, Any]]], Seen]
"""`SessionTree.see`: the message made of a raw history item, from memory where the session has sent it before."""


@dataclass(slots=True)
class Request:
    """A model call in canonical form. `sampling` holds only what the harness sent; `forward` the chat-body fields that
    engines take as they are (tool_choice, response_format, logit_bias, ...)."""

    dialect: str
    model: str
    history: list[Seen]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    include_usage: bool = False
    top_logprobs: int | None = None
    """None: the harness asked for no logprobs, and gets none."""
    _messages: list[dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as chat messages; shared with other requests, not to be changed."""
        if self._messages is None:
            self._messages = [seen.message for seen in self.history]
        return self._messages


@dataclass(slots=True)
class Delta:
    """A piece of one choice's reply; tool calls in the chat stream's shape, ids already minted."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Mapping[str, Any]] = ()


@dataclass(slots=True)
class Choice:
    """One finished choice. `message` is a chat message; `logprobs` is chat-shaped content, None when not asked for."""

    index: int
    call_id: str
    message: dict[str, Any]
    finish_reason: str
    completion_tokens: int
    logprobs: Sequence[Mapping[str, Any]] | None = None


@dataclass(slots=True)
class Reply:
    reply_id: str
    model: str
    created: int
    prompt_tokens: int
    choices: list[Choice]
    cached_tokens: int = 0

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


@dataclass(slots=True)
class ErrorAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


class StreamRenderer(Protocol):
    def open(self) -> bytes:
        """The first events, sent before anything is certain."""
        ...

    def delta(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes:
        """A typed event that the dialect's clients count as life."""
        ...

    def close(self, reply: Reply) -> bytes:
        """What no delta carried, the finish, usage and terminator."""
        ...

    def error(self, error: VerbatimError) -> bytes:
        """The error as an event of a stream that has begun."""
        ...


class Dialect(Protocol):
    name: str

    def parse(self, body: bytes, see: See) -> Request:
        """The canonical request; `see` decodes a raw history item once per session. Raises RequestError naming the field and
        the rule it broke."""
        ...

    def render(self, request: Request, reply: Reply) -> bytes: ...

    def open_stream(self, request: Request, reply_id: str, created: int) -> StreamRenderer: ...

    def error(self, error: VerbatimError) -> ErrorAnswer: ...
