"""What every dialect translates to and from: one canonical request, one reply, and the events of a stream.

A dialect is stateless. `parse` turns what came in into a `Request` whose messages are OpenAI chat messages; `render` turns a
`Reply` into the body of an unstreamed answer; `open_stream` gives a renderer that is fed `Delta`s as text becomes certain and
closed with the `Reply`, which emits whatever no delta carried. So one assembler serves streamed and whole replies.

A reply's tool calls carry ids that name their call (`call_<call id>_<position>`, see proxy.minting). A dialect may write them in
its vendor's way, as long as `parse` reads the same ids back; ids of other things it mints (items, signatures) it reads back as
`Heard.minted`.
"""

from __future__ import annotations

import base64
import os
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from proxy.errors import VerbatimError
from reconstruct.messages import Digests
from reconstruct.records import Call


@dataclass(frozen=True, slots=True)
class Asked:
    """What came in: the body, the named parts of the path (Gemini names model and method there) and the query."""

    body: bytes
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)


class Past(Protocol):
    """What a dialect may know of the session while it reads one request: `proxy.call.tree.Draft`."""

    missed: set[str]
    """Calls that the request names and that were looked up in vain: asked for again they are not known to the store either."""

    def see(self, raw: bytes, read: Read) -> list[Seen]:
        """The messages that `read` makes of a raw item, from memory where the session has sent the item before. `read` must be
        the same function every time."""
        ...

    def call(self, call_id: str) -> Call:
        """Raises UnknownCall; the caller of the dialect then looks into the store and asks again."""
        ...

    def reply(self, call_id: str) -> dict[str, Any]:
        """The call's reply as a chat message. Raises UnknownCall."""
        ...

    def history(self, call_id: str) -> list[Seen]:
        """The messages of the call's request, then its reply. Raises UnknownCall."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Seen:
    """One message of the session's histories, decoded and digested once; requests share it. `minted`: the calls that ids in it
    name. `projections`: how it shows the reply of a call, by the call's id (see reconstruct.messages.projection); kept here, so that
    what was compared is forgotten with the message."""

    message: dict[str, Any]
    digests: Digests
    minted: tuple[str, ...] = ()
    projections: dict[str, str | None] = field(default_factory=dict, repr=False)


@dataclass(slots=True)
class Request:
    """A model call in canonical form. `sampling` holds only what the harness sent; `forward` the chat-body fields that
    engines take as they are (tool_choice, response_format, logit_bias, ...).

    `echo` is what the dialect wants back when it renders the reply. `marks` are kept with the record. `dropped_tools` names the
    kinds of tools that were offered and that no engine can serve; they are counted."""

    dialect: str
    model: str
    history: list[Seen]
    tools: list[dict[str, Any]] = field(default_factory=list)
    template_kwargs: dict[str, Any] = field(default_factory=dict)
    sampling: dict[str, Any] = field(default_factory=dict)
    forward: dict[str, Any] = field(default_factory=dict)
    n: int = 1
    stream: bool = False
    stream_type: str = "text/event-stream; charset=utf-8"
    """The content type of a streamed answer."""
    include_usage: bool = False
    top_logprobs: int | None = None
    """None: the harness asked for no logprobs, and gets none."""
    echo: Any = None
    marks: dict[str, str] = field(default_factory=dict)
    dropped_tools: Sequence[str] = ()
    prompt: str | list[int] | None = None
    """The prompt of a dialect that has one instead of messages: text or token ids, to be continued as it is."""
    wants_ids: bool = False
    """Whether the harness wants the token ids back."""
    _messages: list[dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    _schemas: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as chat messages; shared with other requests, not to be changed."""
        if self._messages is None:
            self._messages = [seen.message for seen in self.history]
        return self._messages

    @property
    def schemas(self) -> dict[str, Any]:
        """The JSON schema of each tool's parameters, by the tool's name."""
        if self._schemas is None:
            functions = (tool.get("function") for tool in self.tools)
            self._schemas = {str(each.get("name")): each.get("parameters") for each in functions if isinstance(each, dict)}
        return self._schemas

    def retell(self, history: list[Seen]) -> None:
        """The same request with its history told otherwise: a prompt as what earlier calls said and what is new."""
        self.history, self._messages = history, None


@dataclass(frozen=True, slots=True)
class Sampling:
    """The engine is asked next, of what is planned by now; with another engine it may come again."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine has sampled a first token: a streamed answer begins, though nothing of its text may be certain yet."""


@dataclass(slots=True)
class Delta:
    """A piece of one choice's reply; tool calls in the chat stream's shape, ids already minted. `token_ids` only where the
    engine says which ids the text is of."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] = ()

    def split(self) -> Sequence[Delta]:
        """The same as deltas that tell one thing each: reasoning, text, or a piece of one tool call. Logprobs and ids go with the first.

        There are clients that take the text of a chunk and pass over the calls beside it, or all calls of a chunk but one.
        """
        if bool(self.content) + bool(self.reasoning) + len(self.tool_calls) <= 1:
            return (self,)
        parts = [Delta(self.index, reasoning=self.reasoning)] if self.reasoning else []
        parts += [Delta(self.index, self.content)] if self.content else []
        parts += [Delta(self.index, tool_calls=(call,)) for call in self.tool_calls]
        parts[0].logprobs, parts[0].token_ids = self.logprobs, self.token_ids
        return parts


@dataclass(slots=True)
class Choice:
    """One finished choice. `message` is a chat message; `logprobs` is chat-shaped content, None when not asked for."""

    index: int
    call_id: str
    message: dict[str, Any]
    finish_reason: str
    completion_tokens: int
    logprobs: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] = ()
    stop_reason: str | int | None = None
    """The stop text or stop token's id that ended it, as the engine says; None for the model's usual end."""


@dataclass(slots=True)
class Reply:
    reply_id: str
    model: str
    created: int
    prompt_tokens: int
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_ids: Sequence[int] = ()

    @property
    def completion_tokens(self) -> int:
        return sum(choice.completion_tokens for choice in self.choices)


@dataclass(slots=True)
class ErrorAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


def retry_headers(error: VerbatimError) -> dict[str, str]:
    """What tells every vendor's client whether and when to ask again.

    Always a Retry-After with an error that may pass: without one some clients give up. `x-should-retry` is read by the SDKs of
    OpenAI and Anthropic, which would ask a closed session again.
    """
    if error.retry_after_seconds is not None:
        return {"retry-after": str(max(1, round(error.retry_after_seconds)))}
    return {"x-should-retry": "false"} if error.status < 500 else {}


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

    def parse(self, asked: Asked, past: Past) -> Request:
        """The canonical request. Raises RequestError naming the field and the rule it broke."""
        ...

    def render(self, request: Request, reply: Reply) -> bytes: ...

    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> StreamRenderer:
        """`prompt_tokens` is 0 while they are not known."""
        ...

    def error(self, error: VerbatimError) -> ErrorAnswer: ...

    def errs_in_stream(self, error: VerbatimError) -> bool:
        """Whether clients that asked for a stream look for this error in its events, even when it is all there is."""
        ...


class Counts(Protocol):
    """A dialect with an endpoint that counts the tokens of a prompt."""

    def parse_count(self, asked: Asked, past: Past) -> Request: ...

    def count(self, tokens: int) -> bytes: ...


class Lists(Protocol):
    """A dialect with an endpoint that lists models: name -> context window in tokens, None where it is not known."""

    def models(self, names: Mapping[str, int | None], created: int) -> bytes: ...

    def model(self, name: str, window: int | None, created: int) -> bytes: ...


# Ids that the service mints into its replies, so that a replayed reply names the call it came from.


_SEAL = b"verbatim1:"
_CALL_ID_LENGTH = 24
_LONGEST_REASONING = 2**24
"""Bytes; what a seal may unfold to."""


def new_call_id() -> str:
    """24 hex digits, ordered by time of minting: 12 of milliseconds, 12 random."""
    return f"{int(time.time() * 1000):012x}{os.urandom(6).hex()}"


def tool_call_id(call_id: str, position: int) -> str:
    """`call_<call id>_<position>`: reconstruct.messages.minted_call_ids reads it back."""
    return f"call_{call_id}_{position}"


def seal(call_id: str, reasoning: str = "") -> str:
    """What a vendor's client carries along unread and brings back (a thinking signature, encrypted reasoning): the call's name,
    and the reasoning for clients that drop its text. Standard base64, as clients check."""
    return base64.b64encode(_SEAL + call_id.encode() + zlib.compress(reasoning.encode("utf-8", "replace"))).decode()


def unseal(sealed: Any) -> tuple[str, str] | None:
    """(call id, reasoning) of a seal; None for anything else, as another service's signature."""
    if not isinstance(sealed, str):
        return None
    try:
        content = base64.b64decode(sealed.encode(), validate=True)
        if not content.startswith(_SEAL):
            return None
        call_id = content[len(_SEAL) : len(_SEAL) + _CALL_ID_LENGTH].decode()
        opened = zlib.decompressobj().decompress(content[len(_SEAL) + _CALL_ID_LENGTH :], _LONGEST_REASONING)
        return call_id, opened.decode()
    except (ValueError, zlib.error):
        return None


# The history of a request: its messages as a dialect hears them, and as a session has seen them.


@dataclass(frozen=True, slots=True)
class Heard:
    """A chat message as a dialect read it. `minted` names the call whose reply it is, where an id that the service minted into
    something else than a tool call says so."""

    message: dict[str, Any]
    minted: str = ""


Read = Callable[[bytes], list[Heard]]
"""How a dialect reads one raw item of a history."""
