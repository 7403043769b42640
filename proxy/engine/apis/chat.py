"""The chat path: any OpenAI-compatible server, asked for token ids and logprobs along with the text.

A prompt instead of messages goes to `/v1/completions`; its ids, if it is ids, are then the very ids the engine samples after.

The engine renders the messages itself, so a later turn is not sampled after the very ids of an earlier one; where its rendering
happens to begin with them the tree still grows in one row, elsewhere it branches. A server that returns no ids is served and
flagged: its calls are never trained. Such a server reports no weight versions either: the version is what the replica is known to hold
before the call, if it still says the same after it, and unknown otherwise.

Of vLLM's details a whole answer tells all that were asked for; the most probable tokens come as ids only when the harness asked for no
logprobs of its own, which are told as text.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import Assembly, Job, Outcome, Sampled, at, chat_body, check_entries, check_heard, shows
from proxy.engine.apis.details import PromptLogprobs, Tops, details_of
from proxy.engine.apis.id_text import IdText
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp, Line, Told, UnknownRoute
from proxy.errors import ContextTooLong, EngineFailed, RequestError, VerbatimError
from reconstruct.errors import IdOutOfRange
from reconstruct.records import Ids, Span

_TOKENIZED = ("model", "messages", "prompt", "tools", "chat_template_kwargs", "add_special_tokens")


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int | None = None


class ChatApi:
    api = "chat"

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Streaming, yields FirstToken and the engine's own deltas; then one Outcome."""
        before = replica.weight_version
        choices = [Gathered(index) for index in range(job.request.n)]
        seen = Seen(job.id_text)
        broken, begun = None, not stream
        try:
            async for answer in self._answers(replica, job, stream):
                if not begun:
                    begun = True
                    yield FirstToken()
                seen.take(answer)
                seen.usage = answer.usage or seen.usage
                for choice in answer.choices:
                    seen.take(choice)
                    delta = at(choices, choice.index).add(choice)
                    if stream and shows(job.request, delta):
                        yield delta
        except VerbatimError as error:
            if not any(choice.token_ids or choice.assembly for choice in choices):
                raise
            broken = error.message
        else:
            check_heard(choices)
        version = await self._http.version_since(replica, before, job.line)
        yield _outcome(job, choices, seen, broken, version)

    async def _answers(self, replica: Replica, job: Job, stream: bool) -> AsyncIterator[Answer]:
        body, headers = _body(replica, job, stream), {"x-request-id": job.call_id}
        try:
            async for answer in self._ask(replica, body, headers, job.line, stream):
                yield answer
        except UnknownRoute as error:
            if job.request.prompt is None:
                raise
            raise RequestError(f"engine {replica.name} takes no prompts without messages", param="prompt") from error
        except (ContextTooLong, RequestError) as error:
            limit = await self._room(replica, body, error)
            job.line.redial()
            job.sampling["max_tokens"] = body["max_tokens"] = limit
            async for answer in self._ask(replica, body, headers, job.line, stream):
                yield answer

    def _ask(
        self, replica: Replica, body: dict[str, Any], headers: dict[str, str], line: Line, stream: bool
    ) -> AsyncIterator[Answer]:
        path = "/v1/completions" if "prompt" in body else "/v1/chat/completions"
        return self._http.answers(replica, path, body, Answer, line, stream=stream, headers=headers)

    async def _room(self, replica: Replica, body: Mapping[str, Any], error: VerbatimError) -> int:
        """Tokens the window leaves after the prompt, when it was only max_tokens that did not fit.

        Re-raises the engine's own refusal where something else is wrong or the engine cannot count."""
        about_limit = isinstance(error, ContextTooLong) or error.param == "max_tokens" or "max_tokens" in error.message
        if "max_tokens" not in body or not about_limit:
            raise error
        try:
            counted = await self._tokenized(replica, body)
        except VerbatimError:
            raise error from None
        room = (counted.max_model_len or 0) - counted.count
        if room < 1 or room >= body["max_tokens"]:
            raise error
        return room

    async def count(self, replica: Replica, request: Request) -> int:
        body = {**chat_body(request, {}), "model": replica.model_for(request.model)}
        try:
            return (await self._tokenized(replica, body)).count
        except UnknownRoute as error:
            raise RequestError(f"engine {replica.name} cannot count tokens: it has no /tokenize") from error

    async def _tokenized(self, replica: Replica, body: Mapping[str, Any]) -> _Tokenized:
        prompt = body.get("prompt")
        if isinstance(prompt, list):
            return _Tokenized(len(prompt), replica.max_model_len)
        question = {key: body[key] for key in _TOKENIZED if key in body}
        return await self._http.ask(replica, "/tokenize", question, _Tokenized)

    async def abort(self, replica: Replica, job: Job) -> bool:
        engine_id = f"chatcmpl-{job.call_id}" if job.request.prompt is None else f"cmpl-{job.call_id}-0"
        body = {"request_ids": [engine_id]}
        try:
            await self._http.ask(replica, "/abort_requests", body, dict[str, Any])
        except VerbatimError:
            return False
        return True


def _body(replica: Replica, job: Job, stream: bool) -> dict[str, Any]:
    body = chat_body(job.request, job.sampling)
    body["model"] = replica.model_for(job.request.model)
    top = job.wanted.logprobs(None) if _tells_top_ids(job) else job.request.top_logprobs or 0
    body |= {"logprobs": True, "top_logprobs": top} if job.request.prompt is None else {"logprobs": top}
    body |= {"return_token_ids": True, "stream": stream}
    if _tells_top_ids(job):
        body["return_tokens_as_token_ids"] = True
    if job.wanted.prompt_logprobs and not stream:
        body["prompt_logprobs"] = 0
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _tells_top_ids(job: Job) -> bool:
    """Whether tokens may be told as ids in the place of their text: the harness sees none of them."""
    return job.wanted.top_logprobs > 0 and job.request.top_logprobs is None


_AS_ID = "token_id:"


def _named(entries: Sequence[Mapping[str, Any]]) -> list[int]:
    """The sampled tokens that are told as ids."""
    return [int(entry["token"].removeprefix(_AS_ID)) for entry in entries if entry["token"].startswith(_AS_ID)]


def _tops(entries: Sequence[Mapping[str, Any]]) -> Tops:
    """The alternatives that are told as ids."""
    return [
        [
            (int(top["token"].removeprefix(_AS_ID)), top["logprob"])
            for top in entry.get("top_logprobs") or ()
            if top["token"].startswith(_AS_ID) and top["logprob"] is not None
        ]
        for entry in entries
    ]


def _outcome(job: Job, choices: Sequence[Gathered], seen: Seen, broken: str | None, version: int | None) -> Outcome:
    sampled = [_sampled(job, choice, seen, version) for choice in choices]
    usage = seen.usage or Usage(prompt_tokens=0 if seen.prompt_ids is None else len(seen.prompt_ids))
    details = usage.prompt_tokens_details
    return Outcome(
        choices=sampled,
        prompt_ids=seen.prompt_ids,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        broken=broken,
        extra={"completion_tokens": usage.completion_tokens},
    )


def _sampled(job: Job, choice: Gathered, seen: Seen, version: int | None) -> Sampled:
    count, details = len(choice.token_ids or ()), None
    if choice.token_ids and _tells_top_ids(job):
        check_entries(choice.index, choice.token_ids, _named(choice.entries))
    if choice.token_ids is not None and seen.prompt_ids is not None:
        details = details_of(
            job.wanted,
            seen.prompt_ids,
            count,
            tops=_tops(choice.entries) if _tells_top_ids(job) else None,
            prompt_logprobs=seen.prompt_logprobs,
            routed_experts=choice.routed_experts,
        )
    return Sampled(
        index=choice.index,
        token_ids=choice.token_ids,
        logprobs=[entry.get("logprob") for entry in choice.entries],
        spans=(Span(version, 0, count),) if version is not None and count else (),
        finish_reason=choice.finish_reason or "abort",
        stop_reason=choice.stop_reason,
        message=choice.assembly.message(),
        logprob_content=choice.entries if job.request.top_logprobs is not None else None,
        details=details,
    )


# What an OpenAI-compatible server answers to a model call, whole or in chunks, and how that is put together.


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
