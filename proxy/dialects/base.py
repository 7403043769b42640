"""What a wire dialect is, and the canonical request, reply and stream events that every dialect translates to and from.

A dialect is one stateless object that holds everything about it: endpoints, base URLs, parsing, rendering. `parse` turns a
body into a `Request` whose messages are OpenAI chat messages; `render` turns a `Reply` into the body of a whole answer; `open_stream`
returns a renderer that is fed `Delta`s as text becomes certain and is closed with the `Reply`, of which it emits whatever no delta
carried. So one assembler serves streamed and whole replies.

Tool calls of a reply carry ids that name their call (`call_<call id>_<position>`). A dialect may write them its vendor's way as long
as `parse` restores them; any other id it mints (items, signatures) it reads back as `ParsedMessage.minted`.
"""

from __future__ import annotations

import base64
import functools
import os
import time
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, Protocol, TypeVar, runtime_checkable

import msgspec

from proxy.dialects.raw_history import SplitBody
from proxy.errors import RequestError, VerbatimError
from reconstruct.messages import Digests
from reconstruct.records import MODEL, Call

T = TypeVar("T")

Action = Literal["call", "count", "models", "model", "stored", "items"]
"""What an endpoint does. Only `call` samples and records."""

V1 = r"(?:/v1){0,2}"
"""A client given a base URL of another vendor's kind repeats /v1 or omits it."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One endpoint. Of endpoints that share method and path, one that names a `header` serves the requests that carry it.

    `path` begins with the API version; `versions` is a regular expression for every accepted spelling of that segment. `{model}` may
    contain slashes, other names may not. `names` are added to those matched in the path. The rest is for the OpenAPI document."""

    action: Action
    method: str
    path: str
    title: str = ""
    summary: str = ""
    example: Mapping[str, Any] | None = None
    versions: str = V1
    names: Mapping[str, str] = field(default_factory=dict)
    header: str | None = None


class Dialect(ABC):
    name: ClassVar[str]
    """Stored with every call, and a metric label."""
    title: ClassVar[str]
    endpoints: ClassVar[Sequence[Endpoint]]
    paths: ClassVar[str] = ""
    """Regular expression, matched at the start of a path without its session: the paths that belong to the dialect's clients. Whatever
    goes wrong at one of them, even that it is no endpoint, is answered in the dialect's error shape. Other paths below /v1 get OpenAI's."""
    probes: ClassVar[Sequence[str]] = ()
    """Regular expressions of paths that clients GET or HEAD before their first call; answered 200 without a key."""
    client: ClassVar[str]
    """The key in `base_urls` of a new session. Dialects whose clients share a base URL share it."""
    base_url_suffix: ClassVar[str] = ""
    """Follows `/s/{session_id}` in that base URL."""
    history_field: ClassVar[str] = "messages"
    """The body field that holds the history."""
    is_one_to_one: ClassVar[bool] = False
    """Whether the field's items are the canonical messages, so that an error can name one by its index."""
    operation: ClassVar[str] = "chat"
    """`gen_ai.operation.name` of OpenTelemetry's semantic conventions."""

    @abstractmethod
    def parse(self, incoming: Incoming, past: Past) -> Request:
        """The canonical request. Raises RequestError naming the field and the rule it broke, UnknownCall for a call of the session
        that is named and not in memory."""

    def parse_count(self, incoming: Incoming, past: Past) -> Request:
        """The canonical request of a `count` endpoint, of which only the prompt matters."""
        return self.parse(incoming, past)

    @abstractmethod
    def render(self, request: Request, reply: Reply) -> bytes: ...

    @abstractmethod
    def open_stream(self, request: Request, reply_id: str, created: int, prompt_tokens: int) -> StreamRenderer:
        """`prompt_tokens` is 0 while they are not known."""

    @abstractmethod
    def render_error(self, error: VerbatimError) -> ErrorAnswer: ...

    def is_streamed_error(self, error: VerbatimError) -> bool:
        """Whether clients that asked for a stream expect this error as an event, even when nothing precedes it."""
        return False


@runtime_checkable
class Counts(Protocol):
    """A dialect with a `count` endpoint."""

    def render_count(self, tokens: int) -> bytes: ...


@runtime_checkable
class Lists(Protocol):
    """A dialect with `models` and `model` endpoints; a context window is in tokens, None if unknown."""

    def render_models(self, windows: Mapping[str, int | None], created: int) -> bytes: ...

    def render_model(self, name: str, window: int | None, created: int) -> bytes: ...


@runtime_checkable
class Stores(Protocol):
    """A dialect with `stored` and `items` endpoints: replies that clients fetch again."""

    def render_stored(self, response_id: str, action: Action, past: Past) -> tuple[Call, bytes]:
        """The call, with its reply ("stored") or the items it answered ("items"). Raises UnknownCall."""
        ...


REQUIRED: Mapping[Action, type] = {"count": Counts, "models": Lists, "model": Lists, "stored": Stores, "items": Stores}
"""What a dialect must implement to have an endpoint with that action."""


class StreamRenderer(Protocol):
    def open(self) -> bytes:
        """The first events, sent before any text is certain."""
        ...

    def write(self, delta: Delta) -> bytes: ...

    def keep_alive(self) -> bytes:
        """A typed event that resets the timeouts of the dialect's clients."""
        ...

    def close(self, reply: Reply) -> bytes:
        """What no delta carried, the finish reason, usage and terminator."""
        ...

    def fail(self, error: VerbatimError) -> bytes:
        """The error as an event of a stream that has begun."""
        ...


@dataclass(frozen=True, slots=True)
class Incoming:
    """A harness's request: the body, the names in its path (Gemini puts model and method there) and the query."""

    body: bytes
    path: Mapping[str, str] = field(default_factory=dict)
    query: Mapping[str, str] = field(default_factory=dict)
    later_system_role: str = "user"
    """The role given to system messages after the first message: many templates take only one system message."""


@dataclass(frozen=True, slots=True)
class ParsedMessage:
    """A chat message as a dialect read it. `minted`: the call whose reply it is, if an id other than a tool call's says so."""

    message: dict[str, Any]
    minted: str = ""


ItemReader = Callable[[bytes, "Past"], list[ParsedMessage]]
"""Reads one raw item of a history. What it makes of an item is remembered for the session, so it must hold for every later request."""


class Unit(NamedTuple):
    """Raw items of a history that are read together."""

    start: int
    """The number of its first item."""
    raw: bytes
    """What `read` takes."""
    read: ItemReader | None
    """None: the dialect itself reads it with every request."""
    fresh: bool = True
    """Whether items from here on are divided alike whatever stands before, as long as all that stand before are there: units before
    this one stay what they are, and this one with its items begins a history of its own that is divided in the same way."""


Divide = Callable[[Sequence[bytes]], Iterable[Unit]]
"""Divides the raw items of a history into units. What a session remembers of a history is remembered under this function: pass the same
one every time, and none that holds anything of the request."""


@functools.cache
def one_by_one(read: ItemReader) -> Divide:
    """Each item on its own."""

    def divide(items: Sequence[bytes]) -> Iterable[Unit]:
        return [Unit(at, item, read) for at, item in enumerate(items)]

    return divide


@dataclass(frozen=True, slots=True, eq=False)
class HistoryMessage:
    """A message of the session's histories, decoded and digested once and shared by requests. `minted`: the calls that ids in it name.
    `images`: the digests of its images, in order.
    `projections`: call id -> how the message shows that call's reply (see reconstruct.messages.projection); `engine_form`: the message as
    an engine gets it, once it is known for good. Both are kept here so that they are forgotten with the message."""

    message: dict[str, Any]
    digests: Digests
    minted: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    projections: dict[str, str | None] = field(default_factory=dict, repr=False)
    engine_form: list[Mapping[str, Any]] = field(default_factory=list, repr=False)


class Past(Protocol):
    """What a dialect may learn of the session while it reads a request: `proxy.call.draft.Draft`."""

    refreshed: bool
    """Whether the store was asked for what the session has: a call that is still not known is no call of it."""

    seals: Seals
    """Opens the request's seals."""

    def split(self, body: bytes, listed: str, divide: Divide) -> SplitBody:
        """The body's fields, decoded, and its history in the field `listed`, which `divide` is to divide: see `split_body`. What the
        session's last recorded bodies brought, too, is not parsed again. Raises RequestError."""
        ...

    def read(self, split: SplitBody, divide: Divide) -> tuple[list[HistoryMessage], list[bytes]]:
        """The messages of the history, and its units without a reader, both in order. Raises what the readers raise."""
        ...

    def convert(self, given: Any, convert: Callable[[Any], T]) -> T:
        """What `convert` makes of a field's value: the very same object as for a recorded call that brought the same bytes, if they
        are many. So it must depend on nothing else, and what it returns must not be changed. Raises what `convert` does."""
        ...

    def read_item(self, raw: bytes, read: ItemReader) -> list[HistoryMessage]:
        """The messages that `read` makes of a raw item, from memory if the session has sent the item before. `read` is part of the
        key and outlives the request: pass the same function every time, and none that holds anything of the request."""
        ...

    def call(self, call_id: str) -> Call:
        """Raises UnknownCall; the dialect's caller then refreshes from the store and parses again."""
        ...

    def reply(self, call_id: str) -> dict[str, Any]:
        """The call's reply as a chat message. Raises UnknownCall."""
        ...

    def history(self, call_id: str) -> list[HistoryMessage]:
        """The messages of the call's request, then its reply. Raises UnknownCall."""
        ...


class _Preamble(msgspec.Struct):
    model: str = ""


def read_model(call: Call) -> str:
    """The model that the call asked for, if its record says so; "": its parent's."""
    return call.marks.get(MODEL) or (msgspec.json.decode(call.preamble, type=_Preamble).model if call.preamble else "")


@dataclass(slots=True)
class Request:
    """A model call in canonical form. `sampling` holds only what the harness sent; `forward` the chat-body fields that engines take
    unchanged (tool_choice, response_format, logit_bias, ...).

    `echo` is what the dialect needs again to render the reply. `marks` are stored with the record. `dropped_tools`: kinds of offered
    tools that no engine can serve; a metric counts them."""

    dialect: str
    model: str
    history: list[HistoryMessage]
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
    """None: the harness requested no logprobs and gets none."""
    echo: Any = None
    marks: dict[str, str] = field(default_factory=dict)
    dropped_tools: Sequence[str] = ()
    prompt: str | list[int] | None = None
    """Text or token ids to continue as they are, in a dialect that has a prompt instead of messages."""
    wants_ids: bool = False
    """Whether the harness wants the token ids back."""
    images: Sequence[str] = ()
    """The digests of the history's images, in order."""
    image_bytes: Mapping[str, bytes] = field(default_factory=dict)
    """Their bytes, once the call is about to be planned."""
    image_urls: Mapping[str, str] = field(default_factory=dict, repr=False, compare=False)
    """Their data URLs, once an engine has been sent them."""
    _messages: list[dict[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    _engine_messages: Sequence[Mapping[str, Any]] | None = field(default=None, init=False, repr=False, compare=False)
    _schemas: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The history as chat messages; shared with other requests, do not change them."""
        if self._messages is None:
            self._messages = [seen.message for seen in self.history]
        return self._messages

    @property
    def engine_messages(self) -> Sequence[Mapping[str, Any]]:
        """The messages as an engine gets them: with its own ids of tool calls, once the call is about to be planned."""
        return self.messages if self._engine_messages is None else self._engine_messages

    @engine_messages.setter
    def engine_messages(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self._engine_messages = messages

    @property
    def offers_calls(self) -> bool:
        """Whether the model may call a tool of the request."""
        return bool(self.tools) and self.forward.get("tool_choice") != "none"

    @property
    def schemas(self) -> dict[str, Any]:
        """Tool name -> JSON schema of its parameters."""
        if self._schemas is None:
            self._schemas = {}
            for tool in self.tools:
                if isinstance(function := tool.get("function"), dict):
                    self._schemas[str(function.get("name"))] = function.get("parameters")
        return self._schemas

    def replace_history(self, history: list[HistoryMessage]) -> None:
        """Used to split a prompt into what earlier calls contain and the rest."""
        self.history, self._messages = history, None


class SeveralCalls(Exception):
    """A body asks for several calls: `bodies` has one for each."""

    def __init__(self, bodies: Sequence[bytes]) -> None:
        super().__init__(f"{len(bodies)} calls")
        self.bodies = bodies


def show_logprobs(request: Request, entries: Sequence[Mapping[str, Any]] | None) -> Sequence[Mapping[str, Any]] | None:
    """Chat-shaped entries as the harness gets them: an engine tells the sampled token as its own alternative where none was asked for."""
    if request.top_logprobs or not entries:
        return entries
    return [{**entry, "top_logprobs": []} for entry in entries]


@dataclass(frozen=True, slots=True)
class PromptReady:
    """The prompt is known and about to be sampled after; comes again if another engine is tried. `prompt_tokens` is 0 where only the
    engine counts them."""

    prompt_tokens: int = 0


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The engine has sampled a first token: a streamed answer begins, though none of its text may be certain yet."""


class Delta(msgspec.Struct):
    """A piece of one choice's reply. `tool_calls` have the shape of the chat stream, with minted ids. `token_ids` only if the engine
    says which ids the text is made of."""

    index: int
    content: str = ""
    reasoning: str = ""
    tool_calls: Sequence[Mapping[str, Any]] = ()
    logprobs: Sequence[Mapping[str, Any]] = ()
    token_ids: Sequence[int] = ()

    def split(self) -> Sequence[Delta]:
        """The same as deltas that carry one thing each: reasoning, text, or a piece of one tool call. Logprobs and ids go with the first.

        Some clients read the text of a chunk and skip the tool calls beside it, or read only one of several calls.
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
    """One finished choice. `message` is a chat message; `logprobs` chat-shaped content, None if not requested."""

    index: int
    call_id: str
    message: dict[str, Any]
    finish_reason: str
    completion_tokens: int
    logprobs: Sequence[Mapping[str, Any]] | None = None
    token_ids: Sequence[int] = ()
    stop_reason: str | int | None = None
    """The stop text or stop token id that ended it, as the engine reports it; None for the model's usual end."""


@dataclass(slots=True)
class Reply:
    reply_id: str
    model: str
    created: int
    prompt_tokens: int
    choices: list[Choice]
    cached_tokens: int = 0
    prompt_ids: Sequence[int] = ()
    counted_tokens: int = 0
    """How many tokens the engine says that it sampled for all choices; 0 if it does not."""

    @property
    def completion_tokens(self) -> int:
        """As many as there are ids; of an engine that returns none, as many as it says."""
        return sum([choice.completion_tokens for choice in self.choices]) or self.counted_tokens


@dataclass(slots=True)
class ErrorAnswer:
    status: int
    headers: dict[str, str]
    body: bytes


def retry_headers(error: VerbatimError) -> dict[str, str]:
    """Headers that tell every vendor's client whether and when to retry.

    A temporary error always has Retry-After: some clients give up without one. `x-should-retry` stops the SDKs of OpenAI and Anthropic,
    which would retry the 409 of a closed session.
    """
    if error.retry_after_seconds is not None:
        return {"retry-after": str(max(1, round(error.retry_after_seconds)))}
    return {"x-should-retry": "false"} if error.status < 500 else {}


# Ids that the service mints into its replies, so that a replayed reply names the call it came from.

_SEAL = b"verbatim1:"
_CALL_ID_LENGTH = 24
_PIECE_BYTES = 2**16

MAX_SEALED_BYTES = 2**26
"""Bytes of reasoning that the seals of one request may hold: as many as a body may have by default."""


def new_call_id() -> str:
    """24 hex digits that sort by minting time: 12 of milliseconds, 12 random."""
    return f"{int(time.time() * 1000):012x}{os.urandom(6).hex()}"


def tool_call_id(call_id: str, position: int) -> str:
    """`call_<call id>_<position>`; reconstruct.messages.minted_call_ids reads it back."""
    return f"call_{call_id}_{position}"


def seal(call_id: str, reasoning: str = "") -> str:
    """An opaque value that a vendor's client returns unread (a thinking signature, encrypted reasoning). It holds the call's id, and the
    reasoning for clients that drop its text. Standard base64, which clients check."""
    return base64.b64encode(_SEAL + call_id.encode() + zlib.compress(reasoning.encode("utf-8", "replace"))).decode()


class LongSeals(Exception):
    """The seals of a request hold more than `Seals.most_bytes`, which is less than any request may have."""


@dataclass(slots=True, eq=False)
class Seals:
    """Opens the seals of one request. Anyone can write one that holds a thousand times its own size, so what they hold is counted and
    bounded for all of them together."""

    most_bytes: int = MAX_SEALED_BYTES
    opened_bytes: int = 0
    """Of reasoning, not compressed; what was opened twice counts twice, and what turned out to be damaged counts too."""

    def open(self, sealed: Any) -> tuple[str, str] | None:
        """(call id, reasoning) of a seal; None for anything else, such as another service's signature. Raises RequestError beyond
        MAX_SEALED_BYTES, LongSeals beyond a lower `most_bytes`."""
        if not isinstance(sealed, str):
            return None
        try:
            content = base64.b64decode(sealed.encode(), validate=True)
            if not content.startswith(_SEAL):
                return None
            start = len(_SEAL) + _CALL_ID_LENGTH
            reasoning = b"".join(map(self._count, _decompress(content[start:])))
            return content[len(_SEAL) : start].decode(), reasoning.decode()
        except (ValueError, zlib.error):
            return None

    def _count(self, piece: bytes) -> bytes:
        self.opened_bytes += len(piece)
        if self.opened_bytes <= self.most_bytes:
            return piece
        if self.most_bytes < MAX_SEALED_BYTES:
            raise LongSeals
        raise RequestError(f"the reasoning sealed in the request is longer than {MAX_SEALED_BYTES} bytes")


def _decompress(packed: bytes) -> Iterator[bytes]:
    """A piece at a time, so that damaged data is noticed no later than too much of it. Raises zlib.error."""
    unpacking = zlib.decompressobj()
    while packed and not unpacking.eof:
        yield unpacking.decompress(packed, _PIECE_BYTES)
        packed = unpacking.unconsumed_tail
    yield unpacking.flush()
