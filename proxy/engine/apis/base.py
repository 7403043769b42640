"""EngineKind: everything the service knows about one kind of engine, and the types of a sampling request and its outcome.

A kind is one subclass in one file, found by its name among the entry points `verbatim.engines` (see `proxy.engine.kinds`). The
rest of the service never asks which kind a replica is; it asks `EngineKinds` for the kind's object.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, ClassVar, Protocol, TypeVar

import aiohttp
import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.details import PromptLogprobs, Tops, Wanted, read_details
from proxy.engine.apis.id_text import IdText, IdTexts
from proxy.engine.apis.probe import PROBE_TIMEOUT, NotListening, Probe
from proxy.engine.apis.renderer import LocalRenderer, Rendered, Tokenizer
from proxy.engine.kinds import find_kinds, load_kind
from proxy.engine.replica import Replica
from proxy.engine.weights.vllm import Claim, WeightApi
from proxy.engine.wire.cancel_scope import CancelScope
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineFailed, EngineUnavailable, VerbatimError
from reconstruct.bridge import Rendering
from reconstruct.prompt import Parent, Prompt
from reconstruct.records import NO_LOGPROBS, CallDetails, Ids, Logprobs, Span, pack_ids

NO_IDS = pack_ids([])

DETOKENIZE_CONCURRENCY = 16
"""Requests in flight at an engine that spells one group of ids at a time."""


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """What a replica needs that plans the prompt itself: the parent, if any, the template's turn end, if known, and the room in tokens
    for the prompt and the reply of every choice (None: unlimited). `take` gets the plan, and a generate body with the engine's own
    sampling, before anything is emitted.

    `experts_from_parent`: the routed experts of the parent's positions are recorded."""

    parent: Parent | None
    close: Ids | None
    retain_thinking: bool
    max_total: int | None
    experts_from_parent: bool
    take: Callable[[Prompt, dict[str, Any]], None]


@dataclass(slots=True)
class Job:
    """One sampling request. `prompt_ids` and `body` are empty for a kind that does not take ids, and for a replica that plans, which
    gets `plan` and writes the ids into the job. `id_text` is the session's; `wanted` the details to record beside the tokens."""

    call_id: str
    request: Request
    sampling: dict[str, Any]
    scope: CancelScope
    prompt_ids: Ids = field(default_factory=lambda: NO_IDS)
    body: dict[str, Any] = field(default_factory=dict)
    id_text: IdText = field(default_factory=IdText)
    wanted: Wanted = field(default_factory=Wanted)
    plan: PlanRequest | None = None
    abort_sent: bool = False
    """Whether the engine was asked to end it."""

    @property
    def prompt_json(self) -> msgspec.Raw:
        """`prompt_ids` as JSON text."""
        return msgspec.Raw(self.id_text.write(self.prompt_ids))


@dataclass(slots=True)
class Sampled:
    """One choice as the engine emitted it: one logprob per token id, `spans` empty if versions are unknown, `token_ids` None if the
    engine returned none. `message` is a chat message whose tool-call ids are the engine's. `details` cover the whole prompt and these
    tokens."""

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
    """All choices of a call. `prompt_ids` are the engine's own if it rendered the messages. `broken` says why the reply was cut when
    neither the model nor the harness ended it."""

    choices: list[Sampled]
    prompt_ids: Ids | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    broken: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)


Emit = Callable[[FirstToken | Delta], None]
"""Passes on what the harness may see before the reply is whole."""


class EngineKind(ABC):
    """One kind of engine. The defaults are those of an engine that takes token ids and renders nothing."""

    name: ClassVar[str]
    """What settings, records and metrics call it."""
    detection_order: ClassVar[int] = 50
    """`--engine-api auto` tries kinds in ascending order and takes the first that fits: token 10, sglang 20, completions 30, chat 100."""
    needs_renderer: ClassVar[bool] = False
    """Whether it works only with VERBATIM_RENDERER."""
    takes_ids: ClassVar[bool] = True
    """Whether the service makes the prompt's ids; otherwise the engine renders the messages itself."""

    def __init__(self, http: EngineHttp, local: LocalRenderer) -> None:
        self._http = http
        self._local = local

    def plans(self, replica: Replica, request: Request) -> bool:
        """Whether `sample` plans the prompt, instead of being given its ids."""
        return False

    async def find_plugin(self, probe: Probe) -> bool:
        """Whether the engine has this project's endpoint plugin, of a version that can be used."""
        return False

    @abstractmethod
    async def detect(self, probe: Probe, *, asked: bool) -> str | None:
        """What keeps the engine from being of this kind; None if it is. `asked`: the operator named the kind.

        Raises EngineUnavailable if the engine cannot tell now."""

    @abstractmethod
    async def sample(self, replica: Replica, job: Job, *, stream: bool, emit: Emit) -> Outcome:
        """What was sampled, also when the reply is cut by an abort or a broken connection. Streaming, emits FirstToken and then deltas as
        text becomes certain, if the engine can.

        Raises RequestError (the engine refused the request), EngineUnavailable (it was not reached) or EngineFailed (it broke off
        before a single token was known)."""

    async def abort(self, replica: Replica, job: Job) -> bool:
        """Ask the engine to end the job now; `sample` then finishes with what it has. False if it cannot be asked."""
        return False

    async def count(self, replica: Replica, request: Request) -> int:
        """The length of the request's prompt in tokens. Raises RequestError if the engine cannot count."""
        return await self._local.count(request)

    async def render(self, replica: Replica, request: Request, rendering: Rendering, id_text: IdText) -> Rendered:
        """The ids of the rendering's messages under the request's tools and template kwargs."""
        return await self._local.render(request, rendering)

    def tokenizer(self, replica: Replica, request: Request, id_text: IdText) -> Tokenizer:
        """For requests with a prompt in place of messages."""
        return self._local

    async def spell(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        """The text of each group of ids as it follows others. Raises VerbatimError if the engine cannot tell."""
        if self._local.is_set:
            return await self._local.spell_groups(groups)
        limit = asyncio.Semaphore(DETOKENIZE_CONCURRENCY)
        model = {"model": replica.models[0]} if replica.models else {}

        async def spell_one(group: tuple[int, ...]) -> str:
            async with limit:
                return (await self._http.ask(replica, "/detokenize", {"tokens": list(group), **model}, _Detokenized)).prompt

        # The first alone: one refusal is enough.
        return [await spell_one(groups[0]), *await asyncio.gather(*map(spell_one, groups[1:]))] if groups else []

    async def takes_weights(self, probe: Probe) -> bool:
        return await probe.status("GET", "/weight_info") == 200

    async def find_logprob_mode(self, probe: Probe) -> str | None:
        """How an engine that takes weights computes logprobs; None if it does not say."""
        return await probe.find_logprob_mode()

    def weights(self, replica: Replica, step_seconds: float, claim: Claim | None) -> WeightApi:
        """The replica's weight endpoints; with a claim, for changing what it holds."""
        return WeightApi(self._http.session, replica, step_seconds, claim)

    async def _abort_request(self, replica: Replica, job: Job, request_id: str, path: str = "/abort_requests") -> bool:
        """vLLM's `/abort_requests`. Of several API servers each ends only its own requests: where one was in vain, the next may be reached
        over a new connection."""
        again, job.abort_sent = job.abort_sent, True
        try:
            await self._http.ask(replica, path, {"request_ids": [request_id]}, dict[str, Any], fresh=again)
        except VerbatimError:
            return False
        return True


class _Detokenized(msgspec.Struct):
    prompt: str = ""


class EngineKinds:
    """One object per installed kind."""

    def __init__(self, http: EngineHttp, local: LocalRenderer) -> None:
        self._http = http
        self._local = local
        self._id_texts = IdTexts()
        self._kinds: dict[str, EngineKind] = {name: load_kind(entry)(http, local) for name, entry in find_kinds().items()}

    def of(self, replica: Replica) -> EngineKind:
        """Raises EngineUnavailable for a replica that was never reached."""
        if replica.api is None:
            raise EngineUnavailable(f"engine {replica.name} was not reached yet")
        return self._kinds[replica.api]

    def takes_ids(self, name: str) -> bool:
        """False for a kind that is no longer installed."""
        return name in self._kinds and self._kinds[name].takes_ids

    def id_text(self, session_id: str) -> IdText:
        return self._id_texts.of(session_id)

    async def contact(self, replica: Replica, asked: str) -> None:
        """Find out what the replica is: models, kind (`asked`, or "auto"), weight endpoints.

        Raises EngineUnavailable with the reason it cannot serve, NotListening if no connection could be made."""
        probe = Probe(self._http.session, replica.url)
        try:
            await probe.read_models(replica)
            await probe.check_health()
            if not replica.alive or replica.api is None:
                kind = await self.detect(probe, asked)
                replica.updatable = await kind.takes_weights(probe)
                replica.logprob_mode = await kind.find_logprob_mode(probe) if replica.updatable else None
                replica.plugin = await kind.find_plugin(probe)
                replica.api = kind.name
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer within {PROBE_TIMEOUT.total:g} seconds") from error
        except aiohttp.ClientConnectorError as error:
            raise NotListening(f"cannot connect: {error.strerror or error.os_error}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailable(str(error) or type(error).__name__) from error

    async def detect(self, probe: Probe, asked: str) -> EngineKind:
        """The kind that was asked for; with "auto" the first that fits. Raises EngineUnavailable if none does."""
        if asked != "auto":
            reason = await self._kinds[asked].detect(probe, asked=True)
            if reason is not None:
                raise EngineUnavailable(reason)
            return self._kinds[asked]
        for kind in sorted(self._kinds.values(), key=lambda kind: kind.detection_order):
            usable = self._local.is_set or not kind.needs_renderer
            if usable and await kind.detect(probe, asked=False) is None:
                return kind
        raise EngineUnavailable("it is of no known kind")


class Choice(Protocol):
    index: int
    """Which of the reply's choices it is, from 0."""
    heard: bool
    """Whether the engine has sent anything for it."""

    @property
    def has_content(self) -> bool:
        """Whether something was sampled that must be recorded even if the reply breaks off."""
        ...


C = TypeVar("C", bound=Choice)


class Reading:
    """`with Reading(choices) as reading:` around receiving a reply: if it breaks off after something was sampled, the error becomes
    `reading.broken`; if it ends without one of the choices, raises EngineFailed."""

    def __init__(self, choices: Sequence[Choice]) -> None:
        self.broken: str | None = None
        self._choices = choices

    def __enter__(self) -> Reading:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        if isinstance(error, VerbatimError) and any(choice.has_content for choice in self._choices):
            self.broken = error.message
            return True
        if error is None:
            for choice in self._choices:
                if not choice.heard:
                    raise EngineFailed(f"the engine's answer has no choice {choice.index} of {len(self._choices)}")
        return False


def choice_at(choices: Sequence[C], index: int) -> C:
    """The choice the engine speaks of. Raises EngineFailed for an index that was not requested."""
    if not 0 <= index < len(choices):
        raise EngineFailed(f"the engine answered choice {index} of {len(choices)}")
    choice = choices[index]
    choice.heard = True
    return choice


class GeneratedChoice:
    """One choice that vLLM sampled so far, without its logprobs."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.heard = False
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.versions: list[Version] = []
        self.routed_experts: str | bytes | None = None

    @property
    def has_content(self) -> bool:
        return bool(self.token_ids)

    def finish(
        self,
        replica: Replica,
        job: Job,
        logprobs: list[float | None],
        message: dict[str, Any],
        content: Sequence[Mapping[str, Any]] | None,
        prompt_logprobs: PromptLogprobs | Logprobs | None,
        tops: Tops | None = None,
    ) -> Sampled:
        """`content`: chat-shaped logprobs for the harness."""
        return Sampled(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=logprobs,
            spans=self._spans(replica),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            message=message,
            logprob_content=content,
            details=read_details(
                job.wanted,
                job.prompt_ids,
                len(self.token_ids),
                tops=tops,
                prompt_logprobs=prompt_logprobs,
                routed_experts=self.routed_experts,
            ),
        )

    def _spans(self, replica: Replica) -> tuple[Span, ...]:
        """Spans with integer versions; none if any version is unknown, since a token without a version is never trained."""
        spans = []
        for item in self.versions:
            version = replica.version_of(None if item.version is None else str(item.version))
            if version is None:
                return ()
            spans.append(Span(version, item.start, item.end))
        return tuple(spans)


_END_OF_IDS = 2**31
"""Records hold ids as int32. No engine reports the size of its vocabulary: the embedding may exceed the tokenizer."""

_ROUNDING = 1e-4
"""How far above 0 the logprob of a certain token may be, if an engine normalises in less than double precision."""


def check_sampled(outcome: Outcome, logprob_mode: str) -> None:
    """Raises EngineFailed for ids outside int32 and probabilities above 1.

    Lengths are not checked: records whose lengths differ are kept and never trained."""
    if outcome.prompt_ids is not None and len(outcome.prompt_ids) and int(outcome.prompt_ids.min()) < 0:
        raise EngineFailed(f"the engine's prompt has the id {int(outcome.prompt_ids.min())}, which no token has")
    for sampled in outcome.choices:
        if not sampled.token_ids:
            continue
        for token in (min(sampled.token_ids), max(sampled.token_ids)):
            if not 0 <= token < _END_OF_IDS:
                raise EngineFailed(f"choice {sampled.index} of the engine's answer has the id {token}, which no token has")
        most = max([logprob for logprob in sampled.logprobs if logprob is not None], default=0.0)
        if most > _ROUNDING and logprob_mode not in NO_LOGPROBS:
            raise EngineFailed(f"choice {sampled.index} of the engine's answer has the logprob {most:g}, which no token has")


def check_entries(index: int, token_ids: Sequence[int], named: Sequence[int]) -> None:
    """Raises EngineFailed if logprobs name other tokens than were sampled. With another length they are never trained."""
    if len(named) == len(token_ids) and list(named) != list(token_ids):
        token, other = next(pair for pair in zip(token_ids, named, strict=True) if pair[0] != pair[1])
        raise EngineFailed(f"choice {index} of the engine's answer has the logprob of token {other} where {token} was sampled")


def is_visible(request: Request, delta: Delta) -> bool:
    """Whether the harness sees anything of the delta."""
    if delta.content or delta.reasoning or delta.tool_calls:
        return True
    return bool((request.top_logprobs is not None and delta.logprobs) or (request.wants_ids and delta.token_ids))


def chat_body(request: Request, sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The OpenAI body of a canonical request, with its messages or its prompt."""
    body: dict[str, Any] = {**request.forward, "model": request.model, **sampling}
    body |= {"messages": request.messages} if request.prompt is None else {"prompt": request.prompt}
    if request.tools:
        body["tools"] = request.tools
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if request.n > 1:
        body["n"] = request.n
    return body


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    """OpenAI's."""

    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _CachedTokens | None = None

    @property
    def cached_tokens(self) -> int:
        """0 if the engine does not say."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class Version(msgspec.Struct):
    """A span of one weight version, as vLLM and SGLang report it."""

    version: str | int | None
    start: int
    end: int
