"""EngineKind: everything the service knows about one kind of engine, and the types of a sampling request and its outcome.

A kind is one subclass in one file, found by its name among the entry points `verbatim.engines` (see `proxy.engine.kinds`). The
rest of the service never asks which kind a replica is; it asks `proxy.engine.apis.contact.EngineKinds` for the kind's object.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import msgspec

from proxy.dialects.base import Delta, FirstToken, PromptReady, Request
from proxy.engine.apis.evidence import LABEL, PLUGIN, START, Source
from proxy.engine.apis.json_text import NO_IDS, IdText
from proxy.engine.apis.probe import Probe
from proxy.engine.apis.renderer import LocalRenderer, Rendered, Tokenizer
from proxy.engine.apis.reply import EngineReply, WantedDetails
from proxy.engine.apis.scores import Scored, ScoringJob
from proxy.engine.apis.versions import Versions
from proxy.engine.replica import Replica, Served
from proxy.engine.weights.vllm import LOAD_ADAPTER, SETUP, Claim, WeightApi
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineUnavailable, RequestError, VerbatimError
from proxy.images import data_url, write_images
from proxy.timeline import CancelScope
from reconstruct.media import Ranges
from reconstruct.prompt import Parent, Rendering
from reconstruct.records import Ids

DETOKENIZE_CONCURRENCY = 16
"""Requests in flight at an engine that spells one group of ids at a time."""


class PlanRequest(msgspec.Struct, frozen=True):
    """What a replica needs that plans the prompt itself: the parent, if any, the template's turn end, if known, and the room in tokens
    for the prompt and the reply of every choice (None: unlimited). `check` raises RequestError for a prompt with images in these ranges
    that must not be sampled after.

    `experts_from_parent`: the routed experts of the parent's positions are recorded."""

    parent: Parent | None
    close: Ids | None
    retain_thinking: bool
    max_total: int | None
    experts_from_parent: bool
    check: Callable[[Ranges], None]


class SamplingJob(msgspec.Struct, frozen=True):
    """One sampling request. `prompt_ids` and `body` are empty for a kind that does not take ids, and for a replica that plans, which
    gets `plan` and tells the prompt in its reply. `id_text` is the session's; `wanted` the details to record beside the tokens."""

    call_id: str
    request: Request
    sampling: Mapping[str, Any]
    scope: CancelScope
    prompt_ids: Ids = NO_IDS
    body: Mapping[str, Any] = msgspec.field(default_factory=dict)
    id_text: IdText = msgspec.field(default_factory=lambda: IdText())
    wanted: WantedDetails = WantedDetails()
    plan: PlanRequest | None = None
    media: Ranges = ()
    """The ranges of the request's images in `prompt_ids`."""
    served: Served = Served()
    """What it is sampled from."""

    @property
    def model(self) -> str:
        """The engine's name of it."""
        return self.served.name or self.request.model

    @property
    def prompt_json(self) -> msgspec.Raw:
        """`prompt_ids` as JSON text."""
        return msgspec.Raw(self.id_text.write(self.prompt_ids))


class PlansNoMore(EngineUnavailable):
    """The replica lost what planned its prompts, before anything was sampled: the prompt has to be planned here, and the call sampled."""


Emit = Callable[[PromptReady | FirstToken | Sequence[Delta]], None]
"""Passes on what the harness may see before the reply is whole: of what arrives together, all deltas at once."""


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
    takes_images: ClassVar[bool] = False
    """Whether messages may have images; the engine then refuses those that its model does not take."""
    sources: ClassVar[tuple[Source, ...]] = (PLUGIN, START, LABEL)
    """What tells one engine of this kind apart from others behind the same URL."""
    leaves_raw: ClassVar[frozenset[str]] = frozenset(
        {"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "logit_bias", "ignore_eos"}
        | {"allowed_token_ids", "bad_words"}
    )
    """Parameters that bend the choice of tokens and leave raw logprobs raw: those of vLLM 0.32, measured."""
    versions: ClassVar[tuple[Versions, ...]] = ()
    """The versions of each program that it was run with and is known to work on."""
    names_checkpoint: ClassVar[bool] = False
    """Whether its model's name changes with the weights that are pushed."""
    no_weights: ClassVar[str] = f"it has no /weight_info. If it is vLLM, {SETUP}"
    """Why an engine of this kind takes no weights that `takes_weights` says takes none."""

    def __init__(self, http: EngineHttp, local: LocalRenderer) -> None:
        self._http = http
        self._local = local

    def plans(self, replica: Replica, request: Request) -> bool:
        """Whether `sample` plans the prompt, instead of being given its ids."""
        return False

    async def find_plugin(self, probe: Probe, replica: Replica) -> bool:
        """Whether the engine has this project's endpoint plugin, of a version that can be used. One that is installed and cannot be used
        leaves a note on the replica."""
        return False

    @abstractmethod
    async def detect(self, probe: Probe, *, asked: bool) -> str | None:
        """What keeps the engine from being of this kind; None if it is. `asked`: the operator named the kind.

        Raises EngineUnavailable if the engine cannot tell now."""

    @abstractmethod
    async def sample(self, replica: Replica, job: SamplingJob, *, stream: bool, emit: Emit) -> EngineReply:
        """What was sampled, also when the reply is cut by an abort or a broken connection. Streaming, emits FirstToken and then deltas as
        text becomes certain, if the engine can; before them PromptReady, if it plans.

        Raises RequestError (the engine refused the request), EngineUnavailable (it was not reached) or EngineFailed (it broke off
        before a single token was known)."""

    def parameters(self, request: Request, body: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
        """The sampling parameters in effect, by vLLM's names. `body` is the rendering's, `sampling` the call's own.

        By default all that is sent. That has the tools where the engine renders them, since it may also make a grammar of them."""
        sees_tools = not self.takes_ids and request.forward.get("tool_choice") != "none"
        tools = {"tools": request.tools} if sees_tools else {}
        return {**body.get("sampling_params", {}), **request.forward, **tools, **sampling}

    async def abort(self, replica: Replica, job: SamplingJob, *, again: bool) -> bool:
        """Ask the engine to end the job now; `sample` then finishes with what it has. False if it cannot be asked. `again`: it was asked
        before, in vain so far."""
        return False

    async def score(self, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
        """The logprobs that the engine's model gives to ids which it did not sample. Raises RequestError if the engine refuses, or cannot;
        EngineFailed for an answer that is not to be believed, EngineUnavailable if the engine was not reached."""
        raise self.no_scores(replica)

    def no_scores(self, replica: Replica) -> RequestError:
        """That engines of this kind cannot score."""
        return RequestError(
            f"engine {replica.name} answers over the {self.name} API, which gives no logprobs of ids that it did not sample: use vLLM with "
            "--enable-scale-out or the plugin, or SGLang's own API"
        )

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
        return await self._detokenize(replica, groups)

    async def spell_itself(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        """The same by the engine's own vocabulary, whatever renders here."""
        # On its own a word loses its leading blank where the tokenizer marks blanks at the start of words.
        before, *spelled = await self._detokenize(replica, [(0,), *((0, *group) for group in groups)])
        return [text.removeprefix(before) for text in spelled]

    async def _detokenize(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        limit = asyncio.Semaphore(DETOKENIZE_CONCURRENCY)
        model = {"model": replica.name_served(replica.models[0])} if replica.models else {}

        async def spell_one(group: tuple[int, ...]) -> str:
            async with limit:
                return (await self._http.ask(replica, "/detokenize", {"tokens": list(group), **model}, _Detokenized)).prompt

        # The first alone: one refusal is enough.
        return [await spell_one(groups[0]), *await asyncio.gather(*map(spell_one, groups[1:]))] if groups else []

    async def read_version(self, probe: Probe) -> tuple[str, str]:
        """The engine's version as it writes it and, where that cannot be read, what it says instead; both "" if it says nothing."""
        for route, name in self.find_version_routes(probe.owner):
            told = await probe.read_version(route, name)
            if any(told):
                return told
        return "", ""

    def find_version_routes(self, owner: str) -> Sequence[tuple[str, str]]:
        """Where the engine whose models belong to `owner` may tell its version: a route and the field in its answer."""
        return (("/version", "version"),)

    def find_versions(self, owner: str) -> Versions | None:
        """What is known of the versions of the engine whose models belong to `owner`; None: nothing."""
        return self.versions[0] if self.versions else None

    def way_out(self, replica: Replica) -> str:
        """What an operator can do whose engine of this kind cannot be read."""
        other = f", or {self.versions[0]}" if self.versions else ""
        return f"use --engine-api chat{other}"

    async def takes_weights(self, probe: Probe) -> bool:
        return await probe.status("GET", "/weight_info") == 200

    async def loads_adapters(self, probe: Probe) -> bool:
        """Whether the engine loads LoRA adapters while it runs."""
        return not await probe.find_missing(LOAD_ADAPTER)

    async def find_logprob_mode(self, probe: Probe) -> str | None:
        """How an engine that takes weights computes logprobs; None if it does not say."""
        return await probe.find_logprob_mode()

    def weights(self, replica: Replica, step_seconds: float, claim: Claim | None) -> WeightApi:
        """The replica's weight endpoints; with a claim, for changing what it holds."""
        return WeightApi(self._http.session, replica, step_seconds, claim)

    async def _abort_request(self, replica: Replica, request_id: str, path: str = "/abort_requests", *, again: bool) -> bool:
        """vLLM's `/abort_requests`. Of several API servers each ends only its own requests: where one was in vain, the next may be reached
        over a new connection."""
        try:
            await self._http.ask(replica, path, {"request_ids": [request_id]}, dict[str, Any], fresh=again)
        except VerbatimError:
            return False
        return True


class _Detokenized(msgspec.Struct):
    prompt: str = ""


def find_image_urls(request: Request) -> Mapping[str, str]:
    """The data URL of each image, by digest."""
    if not request.image_urls:
        request.image_urls = {digest: data_url(data) for digest, data in request.image_bytes.items()}
    return request.image_urls


def chat_body(
    request: Request, sampling: Mapping[str, Any], id_text: IdText, messages: Sequence[Mapping[str, Any]] | None = None
) -> dict[str, Any]:
    """The OpenAI body of a canonical request, with its messages (or these) or its prompt. What the session's earlier bodies had is not
    encoded again."""
    body: dict[str, Any] = {**request.forward, "model": request.model, **sampling}
    if request.prompt is not None:
        body["prompt"] = request.prompt
    elif request.images:
        body["messages"] = write_images(request.engine_messages if messages is None else messages, find_image_urls(request))
    else:
        body["messages"] = id_text.messages.write(request.engine_messages if messages is None else messages)
    if request.tools:
        body["tools"] = id_text.tools.write(request.tools)
    if request.template_kwargs:
        body["chat_template_kwargs"] = request.template_kwargs
    if request.n > 1:
        body["n"] = request.n
    return body
