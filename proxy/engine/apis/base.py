"""An engine as the flow sees it: render what must be rendered, sample, abort.

Implementations: `token_api` (vLLM's token-in token-out endpoints), `ids_api` and `sglang_api` (engines that take and return ids, and
are rendered for here) and `chat_api` (any OpenAI-compatible server). Streaming, they yield `FirstToken`, and `Delta`s while text
becomes certain, where they can; at the end one `Outcome`. A reply cut by an abort or a broken connection is an Outcome too, with what
was sampled until then.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.details import Wanted
from proxy.engine.apis.id_text import IdText
from proxy.engine.replica import Replica
from proxy.engine.wire.http import Line
from proxy.errors import EngineFailed
from reconstruct.bridge import Rendering
from reconstruct.records import NO_LOGPROBS, CallDetails, Ids, Span


@dataclass(slots=True)
class Rendered:
    """A rendering's ids, int32 of shape (n,), and the rest of the engine's generate body that came with it."""

    ids: Ids
    body: dict[str, Any]


@dataclass(slots=True)
class Job:
    """One sampling request. `prompt_ids` and `body` are None on the chat path, where the engine renders the messages; `id_text`
    is the session's, to read and spell out lists of ids. `wanted` is what the service keeps beside the tokens, where the engine gives
    it."""

    call_id: str
    request: Request
    sampling: dict[str, Any]
    line: Line
    prompt_ids: Ids | None = None
    body: dict[str, Any] | None = None
    id_text: IdText = field(default_factory=IdText)
    wanted: Wanted = field(default_factory=Wanted)

    @property
    def prompt_json(self) -> msgspec.Raw:
        """`prompt_ids` as JSON text."""
        assert self.prompt_ids is not None
        return msgspec.Raw(self.id_text.write(self.prompt_ids))


@dataclass(slots=True)
class Sampled:
    """One choice as the engine emitted it. Lengths: one logprob per token id; `spans` empty when versions are unknown;
    `token_ids` None when the engine returned none. `message` is a chat message without minted ids. `details` are of the whole
    prompt and these tokens."""

    index: int
    token_ids: list[int] | None
    logprobs: list[float | None]
    spans: tuple[Span, ...]
    finish_reason: str
    stop_reason: str | int | None
    message: dict[str, Any]
    logprob_content: Sequence[Mapping[str, Any]] | None = None
    details: CallDetails | None = None


@dataclass(slots=True)
class Outcome:
    """All choices of a call. `prompt_ids` as the engine reported them on the chat path. `broken` says why the reply is cut
    when neither the model nor the harness ended it."""

    choices: list[Sampled]
    prompt_ids: Ids | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    broken: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


class Numbered(Protocol):
    index: int
    """Which of the reply's choices it is, from 0."""
    heard: bool
    """Whether the engine has said anything of it."""


C = TypeVar("C", bound=Numbered)


class Engine(Protocol):
    api: str

    def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Raises RequestError (the engine refused the request), EngineUnavailable (nothing reached it) or EngineFailed
        (it broke off before a single token was known)."""
        ...

    async def abort(self, replica: Replica, job: Job) -> bool:
        """Ask the engine to end the job now; its `sample` then finishes with what it has. False where it cannot be asked."""
        ...

    async def count(self, replica: Replica, request: Request) -> int:
        """The tokens of the request's prompt. Raises RequestError where the engine cannot count."""
        ...


class Renderer(Protocol):
    async def render(self, replica: Replica, request: Request, rendering: Rendering, id_text: IdText) -> Rendered: ...


def at(choices: Sequence[C], index: int) -> C:
    """The choice an engine speaks of. Raises EngineFailed for one that nobody asked for."""
    if not 0 <= index < len(choices):
        raise EngineFailed(f"the engine answered choice {index} of {len(choices)}")
    choice = choices[index]
    choice.heard = True
    return choice


def check_heard(choices: Sequence[Numbered]) -> None:
    """Raise EngineFailed when an answer that came to its end left a choice out."""
    for choice in choices:
        if not choice.heard:
            raise EngineFailed(f"the engine's answer has no choice {choice.index} of {len(choices)}")


_END_OF_IDS = 2**31
"""Records hold ids as int32. How many ids a model has no engine says: its embedding may have more than its tokenizer."""

_ROUNDING = 1e-4
"""How far above 0 a certain token's logprob may end where an engine normalises in less than double precision."""


def check_sampled(outcome: Outcome, logprob_mode: str) -> None:
    """Raise EngineFailed for an answer that cannot be true: ids that are none, or probabilities greater than 1.

    Lengths are not looked at: records whose lengths differ are kept, and never trained."""
    if outcome.prompt_ids is not None and len(outcome.prompt_ids) and int(outcome.prompt_ids.min()) < 0:
        raise EngineFailed(f"the engine's prompt has the id {int(outcome.prompt_ids.min())}, which no token has")
    for sampled in outcome.choices:
        if not sampled.token_ids:
            continue
        for token in (min(sampled.token_ids), max(sampled.token_ids)):
            if not 0 <= token < _END_OF_IDS:
                raise EngineFailed(f"choice {sampled.index} of the engine's answer has the id {token}, which no token has")
        most = max((logprob for logprob in sampled.logprobs if logprob is not None), default=0.0)
        if most > _ROUNDING and logprob_mode not in NO_LOGPROBS:
            raise EngineFailed(f"choice {sampled.index} of the engine's answer has the logprob {most:g}, which no token has")


def check_entries(index: int, token_ids: Sequence[int], named: Sequence[int]) -> None:
    """Raise EngineFailed where logprobs name other tokens than were sampled. Of another length they are never trained."""
    if len(named) == len(token_ids) and list(named) != list(token_ids):
        at = next(at for at, (token, other) in enumerate(zip(token_ids, named, strict=True)) if token != other)
        raise EngineFailed(
            f"choice {index} of the engine's answer has the logprob of token {named[at]} where {token_ids[at]} was sampled"
        )


def spoken(token_ids: list[int], finish_reason: str | None, stop_reason: str | int | None) -> list[int]:
    """Of a choice's ids, all or the last ones, those that show in its text: all but the stop token that ended it. A stop string ends
    it with ids that are text."""
    return token_ids[:-1] if finish_reason == "stop" and not isinstance(stop_reason, str) else token_ids


def shows(request: Request, delta: Delta) -> bool:
    """Whether the harness sees anything of the piece."""
    if delta.content or delta.reasoning or delta.tool_calls:
        return True
    return bool((request.top_logprobs is not None and delta.logprobs) or (request.wants_ids and delta.token_ids))


def chat_body(request: Request, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAI body of a canonical request under the sampling in effect: of its messages, or of its prompt."""
    body: dict[str, Any] = {**request.forward, "model": request.model, **sampling}
    body |= {"messages": request.messages} if request.prompt is None else {"prompt": request.prompt}
    if request.tools:
        body["tools"] = request.tools
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if request.n > 1:
        body["n"] = request.n
    return body


SEED_IDS = 64
"""How many ids before those to be spelled out go along: the engine looks at the last few."""


class Tokenizer(Protocol):
    """The engine's tokenizer for one request."""

    async def tokenize(self, text: str, *, whole: bool) -> Rendered:
        """The ids of a whole prompt, or of a piece that follows others, and the generate body. Raises ContextTooLong."""
        ...

    async def parameters(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        """The generate body for a prompt of ids, without the ids."""
        ...

    async def spell(self, before: Ids, ids: Ids) -> str:
        """The text of `ids` as it follows the ids `before`, special tokens included; an unfinished character is left out."""
        ...


# One assistant message put together from pieces: an engine's whole message, or the deltas of its stream.


class Assembly:
    """The reply of one choice so far. `message()` has the fields harnesses know; tool-call ids are still the engine's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, dict[str, Any]] = {}

    def add(self, piece: Mapping[str, Any]) -> Delta:
        """Take in a message or delta; returns it as a harness sees it."""
        content = piece.get("content") or ""
        reasoning = piece.get("reasoning_content") or piece.get("reasoning") or ""
        calls = piece.get("tool_calls") or []
        self._content.append(content)
        self._reasoning.append(reasoning)
        for position, call in enumerate(calls):
            self._add_call(call.get("index", position), call)
        return Delta(self.index, content, reasoning, calls)

    def message(self) -> dict[str, Any]:
        calls = [self._calls[position] for position in sorted(self._calls)]
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        reasoning = "".join(self._reasoning)
        if reasoning:
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def __bool__(self) -> bool:
        """Whether a piece came, if only an empty one: then the engine has begun to say something."""
        return bool(self._content)

    def _add_call(self, position: int, call: Mapping[str, Any]) -> None:
        known = self._calls.setdefault(position, {"id": "", "type": "function", "function": {"name": "", "arguments": ""}})
        function = call.get("function") or {}
        known["id"] = known["id"] or call.get("id") or ""
        known["function"]["name"] += function.get("name") or ""
        known["function"]["arguments"] += function.get("arguments") or ""
