"""Any OpenAI-compatible server, with a request for token ids and logprobs along with the text.

The server renders the messages itself, so a later turn is not sampled after the very ids of an earlier one: where its rendering
happens to begin with them the row goes on, elsewhere it branches. A prompt in place of messages goes to `completions`; if it is ids,
the engine samples after exactly those. Calls without returned ids are recorded as such and never trained. Such a server reports no
weight versions: the version is the replica's before the call if it still is after it, otherwise unknown.

Of vLLM's details a whole answer carries all; alternatives come as ids only if the harness itself requested no logprobs, which
come as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from operator import attrgetter
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import Emit, EngineKind, SamplingJob, chat_body
from proxy.engine.apis.json_text import IdText
from proxy.engine.apis.probe import SGLANG_INFO, Probe
from proxy.engine.apis.question import Question
from proxy.engine.apis.reply import (
    AS_ID,
    Assembly,
    EngineChoice,
    EngineReply,
    PartialReply,
    PromptLogprobs,
    Tops,
    Usage,
    check_entries,
    choice_at,
    is_visible,
    read_details,
    read_named_id,
)
from proxy.engine.apis.versions import Versions
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineAnswer
from proxy.engine.wire.refusals import UnknownRoute, refusal
from proxy.errors import ContextTooLong, EngineFailed, RequestError, VerbatimError
from reconstruct.errors import IdOutOfRange
from reconstruct.records import Ids
from reconstruct.spans import Span

_VERSION_ROUTES = {
    "sglang": tuple((route, "version") for route in SGLANG_INFO),
    "llamacpp": (("/props", "build_info"),),
    "library": (("/api/version", "version"),),
}
"""Where engines tell their version that do not tell it as vLLM does, by the owner of their models; Ollama's is `library`."""

_TOKENIZE_FIELDS = ("model", "messages", "prompt", "tools", "chat_template_kwargs", "add_special_tokens")


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int | None = None


class OpenAiChat(EngineKind):
    name = "chat"
    detection_order = 100
    takes_ids = False
    takes_images = True
    versions = (Versions("vLLM", run=("0.29", "0.31", "0.32", "0.33"), first="0.22", last="0.33"),)

    async def detect(self, probe: Probe, *, asked: bool) -> str | None:
        return None

    def find_version_routes(self, owner: str) -> Sequence[tuple[str, str]]:
        return _VERSION_ROUTES.get(owner) or super().find_version_routes(owner)

    def find_versions(self, owner: str) -> Versions | None:
        return next((each for each in self.versions if each.program.lower() == owner), None)

    def way_out(self, replica: Replica) -> str:
        return "upgrade the engine, or put a server before it that answers as OpenAI's chat completions do"

    async def sample(self, replica: Replica, job: SamplingJob, *, stream: bool, emit: Emit) -> EngineReply:
        """Emits the engine's own deltas."""
        before = replica.host.weight_version
        offers_calls, entries = job.request.offers_calls, _wants_entries(job)
        choices = [_ChoiceSoFar(index, with_entries=entries, with_texts=offers_calls) for index in range(job.request.n)]
        reply = _ReplySoFar(job.id_text)
        question, adjusted = _make_question(replica, job, stream), dict[str, Any]()

        async def send(body: dict[str, Any]) -> None:
            await self._receive(replica, job, body, choices, reply, emit)

        with PartialReply(choices) as reading:
            try:
                await question.put(job.scope, choices, send)
            except UnknownRoute as error:
                if job.request.prompt is None:
                    raise
                raise RequestError(f"engine {replica.name} takes no prompts without messages", param="prompt") from error
            except RequestError as error:
                # Refused for its max_tokens, perhaps: ask for fewer.
                room = await self._find_room(replica, question.asked) if _may_be_about_limit(error, question.asked) else None
                if room is None:
                    raise
                adjusted["max_tokens"] = question.asked["max_tokens"] = room
                job.scope.redial()
                await question.put(job.scope, choices, send)
        version = await self._http.find_version(replica, before, job.scope)
        outcome = _outcome(job, choices, reply, reading.broken, version)
        outcome.adjusted = adjusted
        # What was sampled after is needed as well.
        replica.note_ids(outcome.returns_ids and reply.prompt_ids is not None, streamed=stream)
        if job.request.images:
            # Equal ids are equal context only where the same images stand behind them, and the engine does not say where.
            outcome.prompt_ids = None
        return outcome

    async def _receive(
        self,
        replica: Replica,
        job: SamplingJob,
        body: dict[str, Any],
        choices: Sequence[_ChoiceSoFar],
        reply: _ReplySoFar,
        emit: Emit,
    ) -> None:
        stream, headers = body["stream"], {"x-request-id": job.call_id}
        path = f"{replica.api_path}/{'completions' if 'prompt' in body else 'chat/completions'}"
        begun, so_far = not stream, choices[0]

        def take(answers: list[_Answer]) -> None:
            nonlocal begun, so_far
            if not begun:
                begun = True
                emit(FirstToken())
            deltas: list[Delta] = []
            try:
                for answer in answers:
                    if answer.prompt_token_ids or answer.prompt_logprobs or answer.usage:
                        reply.update(answer)
                        reply.usage = answer.usage or reply.usage
                    for choice in answer.choices:
                        if choice.prompt_token_ids or choice.prompt_logprobs:
                            reply.update(choice)
                        if not so_far.heard or so_far.index != choice.index:
                            so_far = choice_at(choices, choice.index)
                        delta = so_far.add(choice)
                        if stream and (delta.content or is_visible(job.request, delta)):
                            deltas.append(delta)
            finally:
                if deltas:
                    emit(deltas)

        expected = _Answer if _wants_entries(job) else _BareAnswer
        async with self._http.receive(replica, path, body, expected, job.scope, stream=stream, headers=headers) as answers:
            await answers.follow(take)

    async def abort(self, replica: Replica, job: SamplingJob, *, again: bool) -> bool:
        request_id = f"chatcmpl-{job.call_id}" if job.request.prompt is None else f"cmpl-{job.call_id}-0"
        return await self._abort_request(replica, request_id, again=again)

    async def count(self, replica: Replica, request: Request) -> int:
        body = {**chat_body(request, {}, IdText()), "model": replica.name_served(request.model)}
        try:
            return (await self._tokenize(replica, body)).count
        except UnknownRoute as error:
            raise RequestError(f"engine {replica.name} cannot count tokens: it has no /tokenize") from error

    async def _find_room(self, replica: Replica, body: Mapping[str, Any]) -> int | None:
        """How many tokens the window leaves after the prompt, if only max_tokens did not fit; None if something else is wrong or the
        engine cannot count."""
        try:
            tokenized = await self._tokenize(replica, body)
        except VerbatimError:
            return None
        room = (tokenized.max_model_len or 0) - tokenized.count
        return room if 1 <= room < body["max_tokens"] else None

    async def _tokenize(self, replica: Replica, body: Mapping[str, Any]) -> _Tokenized:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return _Tokenized(len(prompt), replica.max_model_len)
        question = {key: body[key] for key in _TOKENIZE_FIELDS if key in body}
        return await self._http.ask(replica, "/tokenize", question, _Tokenized)


def _may_be_about_limit(error: VerbatimError, body: Mapping[str, Any]) -> bool:
    about_limit = isinstance(error, ContextTooLong) or error.param == "max_tokens" or "max_tokens" in error.message
    return about_limit and "max_tokens" in body


def _make_question(replica: Replica, job: SamplingJob, stream: bool) -> Question:
    request = job.request
    asked = chat_body(request, job.sampling, job.id_text) | {"model": job.model, "stream": stream}
    top = job.wanted.logprobs(None) if _wants_top_ids(job) else request.top_logprobs or 0
    logprobs: dict[str, Any] = {"logprobs": True, "top_logprobs": top} if request.prompt is None else {"logprobs": top}
    added = {"return_token_ids": True, **logprobs}
    if _wants_top_ids(job):
        added["return_tokens_as_token_ids"] = True
    if job.wanted.prompt_logprobs and not stream:
        added["prompt_logprobs"] = 0
    if stream:
        added["stream_options"] = {"include_usage": True}
    # A chat is answered without ids where the engine has none to tell.
    own = {"return_token_ids": request.wants_ids and request.prompt is not None, "stream_options": request.include_usage}
    own |= {"logprobs": request.top_logprobs is not None, "top_logprobs": bool(request.top_logprobs)}
    # What the harness itself asked for is not left out.
    return Question(replica, asked | {name: added.pop(name) for name in [*added] if own.get(name)}, added)


def _wants_top_ids(job: SamplingJob) -> bool:
    """Whether logprobs may name tokens by id in place of their text, because the harness does not see them."""
    return job.wanted.top_logprobs > 0 and job.request.top_logprobs is None


def _named_ids(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    return [read_named_id(entry["token"]) for entry in entries if entry["token"].startswith(AS_ID)]


def _named_tops(entries: Sequence[Mapping[str, Any]]) -> Tops:
    return [
        [
            (read_named_id(top["token"]), top["logprob"])
            for top in entry.get("top_logprobs") or ()
            if top["token"].startswith(AS_ID) and top["logprob"] is not None
        ]
        for entry in entries
    ]


_NOTHING = msgspec.Raw()
_NO_IDS = (b"", b"null", b"[]")
"""How engines that return no prompt ids write them."""


class _Logprobs(msgspec.Struct):
    """Of chat completions (`content`), or of completions (the rest)."""

    content: list[dict[str, Any]] | None = None
    tokens: list[str] = []
    token_logprobs: list[float | None] = []
    top_logprobs: list[dict[str, float] | None] | None = None

    @property
    def values(self) -> Iterable[float | None]:
        """Of the sampled tokens. Raises EngineFailed unless all that is told of them has one length."""
        return [entry.get("logprob") for entry in self.entries]

    @property
    def texts(self) -> Iterable[str]:
        """The sampled tokens as text, or named by id."""
        return [str(entry.get("token", AS_ID)) for entry in self.entries]

    @property
    def entries(self) -> list[dict[str, Any]]:
        """In the chat shape."""
        if self.content is not None:
            return self.content
        tops = self.top_logprobs or [None] * len(self.tokens)
        try:
            return [_entry(*each) for each in zip(self.tokens, self.token_logprobs, tops, strict=True)]
        except ValueError as error:
            raise EngineFailed("the engine's logprobs are not of one length") from error


def _entry(token: str, logprob: float | None, top: Mapping[str, float] | None) -> dict[str, Any]:
    tops = [{"token": name, "logprob": value} for name, value in (top or {}).items()]
    return {"token": token, "logprob": logprob, "top_logprobs": tops}


class _BareEntry(msgspec.Struct, gc=False):
    logprob: float | None = None
    token: str = AS_ID


class _BareLogprobs(_Logprobs):
    """As much as a record needs."""

    content: list[_BareEntry] | None = None  # type: ignore[assignment]

    @property
    def values(self) -> Iterable[float | None]:
        return super().values if self.content is None else map(_logprob, self.content)

    @property
    def texts(self) -> Iterable[str]:
        return super().texts if self.content is None else map(_token, self.content)


_logprob: Callable[[_BareEntry], float | None] = attrgetter("logprob")
_token: Callable[[_BareEntry], str] = attrgetter("token")


class _Choice(msgspec.Struct):
    index: int = 0
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    response_token_ids: list[int] | None = None
    """SGLang's name for them."""
    logprobs: _Logprobs | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    prompt_logprobs: PromptLogprobs | None = None
    routed_experts: str | None = None


class _Answer(EngineAnswer):
    choices: list[_Choice] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    prompt_token_ids: msgspec.Raw = _NOTHING
    prompt_logprobs: PromptLogprobs | None = None

    def check(self, replica: Replica, path: str, content: bytes) -> None:
        """Raises the refusal that an event reports: a server may look at a request only once it has begun a stream."""
        code = self.error.get("code") if isinstance(self.error, dict) else None
        if isinstance(code, int) and 400 <= code < 500:
            raise refusal(replica, path, code, content)
        super().check(replica, path, content)


class _BareChoice(_Choice):
    logprobs: _BareLogprobs | None = None


class _BareAnswer(_Answer):
    choices: list[_BareChoice] = msgspec.field(default_factory=list)  # type: ignore[assignment]


def _wants_entries(job: SamplingJob) -> bool:
    """Whether more than the logprobs of sampled tokens is needed."""
    return job.request.top_logprobs is not None or job.wanted.top_logprobs > 0


class _ReplySoFar:
    """The fields beside the choices of the answer, or of its events so far."""

    def __init__(self, id_text: IdText) -> None:
        self.prompt_ids: Ids | None = None
        self.prompt_logprobs: PromptLogprobs | None = None
        self.usage: Usage | None = None
        self._id_text = id_text

    def update(self, part: _Answer | _Choice) -> None:
        """Raises EngineFailed for prompt ids that are not ids."""
        self.prompt_logprobs = self.prompt_logprobs or part.prompt_logprobs
        if self.prompt_ids is not None or (text := bytes(part.prompt_token_ids)) in _NO_IDS:
            return
        try:
            self.prompt_ids = self._id_text.read(text)
        except (msgspec.DecodeError, IdOutOfRange) as error:
            raise EngineFailed(f"the engine's prompt ids cannot be read: {error}") from error


class _ChoiceSoFar:
    """One choice, put together from an answer or from the chunks of a stream. `with_texts`: also the text of each token."""

    def __init__(self, index: int, *, with_entries: bool, with_texts: bool) -> None:
        self.index = index
        self.heard = False
        self.token_ids: list[int] | None = None
        self.logprobs: list[float | None] = []
        self.entries: list[dict[str, Any]] = []
        self.texts: list[str] = []
        self._with_entries = with_entries
        self._with_texts = with_texts
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.routed_experts: str | None = None
        self.assembly = Assembly(index)

    @property
    def has_content(self) -> bool:
        return bool(self.token_ids or self.assembly)

    @property
    def sampled_text(self) -> str | None:
        """All that was sampled, the markup of tool calls included; None where the engine does not tell."""
        text = "".join(self.texts)
        return text if len(self.texts) == len(self.token_ids or ()) and AS_ID not in text else None

    def add(self, choice: _Choice) -> Delta:
        """Add one piece; returns it as the harness sees it, tool-call ids still the engine's."""
        ids = choice.token_ids if choice.token_ids is not None else choice.response_token_ids
        if ids is not None:
            if self.token_ids is None:
                self.token_ids = []
            self.token_ids.extend(ids)
        entries: list[dict[str, Any]] = []
        if choice.logprobs is not None:
            self.logprobs.extend(choice.logprobs.values)
            if self._with_texts:
                self.texts.extend(choice.logprobs.texts)
            if self._with_entries:
                entries = choice.logprobs.entries
                self.entries += entries
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
        self.routed_experts = choice.routed_experts or self.routed_experts
        piece = {"content": choice.text} if choice.text is not None else choice.delta or choice.message or {}
        delta = self.assembly.add(piece)
        delta.logprobs, delta.token_ids = entries, ids or ()
        return delta


def _outcome(
    job: SamplingJob, choices: Sequence[_ChoiceSoFar], reply: _ReplySoFar, broken: str | None, version: int | None
) -> EngineReply:
    usage = reply.usage or Usage(prompt_tokens=0 if reply.prompt_ids is None else len(reply.prompt_ids))
    return EngineReply(
        choices=[_build_sampled(job, choice, reply, version) for choice in choices],
        prompt_ids=reply.prompt_ids,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=usage.cached_tokens,
        broken=broken,
        completion_tokens=usage.completion_tokens or 0,
    )


def _build_sampled(job: SamplingJob, choice: _ChoiceSoFar, reply: _ReplySoFar, version: int | None) -> EngineChoice:
    count, details = len(choice.token_ids or ()), None
    if choice.token_ids and _wants_top_ids(job):
        check_entries(choice.index, choice.token_ids, _named_ids(choice.entries))
    if choice.token_ids is not None and reply.prompt_ids is not None:
        details = read_details(
            job.wanted,
            reply.prompt_ids,
            count,
            tops=_named_tops(choice.entries) if _wants_top_ids(job) else None,
            prompt_logprobs=reply.prompt_logprobs,
            routed_experts=choice.routed_experts,
        )
    return EngineChoice(
        index=choice.index,
        token_ids=choice.token_ids,
        logprobs=choice.logprobs,
        spans=(Span(version, 0, count),) if version is not None and count else (),
        finish_reason=choice.finish_reason or "abort",
        stop_reason=choice.stop_reason,
        message=choice.assembly.message(),
        logprob_content=choice.entries if job.request.top_logprobs is not None else None,
        text=choice.sampled_text,
        details=details,
    )
