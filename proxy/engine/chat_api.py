"""The chat path: any OpenAI-compatible server, asked for token ids and logprobs along with the text.

The engine renders the messages itself, so a later turn is not sampled after the very ids of an earlier one; where its rendering
happens to begin with them the tree still grows in one row, elsewhere it branches. A server that returns no ids is served and
flagged: its calls are never trained. Such a server reports no weight versions either: the version is the replica's before the call,
if it is still the same after it, and unknown otherwise.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta
from proxy.engine.assembly import Assembly
from proxy.engine.base import Job, Outcome, Sampled, chat_body
from proxy.engine.replica import Replica
from proxy.engine.wire import EngineHttp, Line
from proxy.errors import ContextTooLong, EngineFailed, RequestError, VerbatimError
from reconstruct.records import Span


class _Logprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _Choice(msgspec.Struct):
    index: int = 0
    message: dict[str, Any] | None = None
    delta: dict[str, Any] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    prompt_token_ids: list[int] | None = None


class _PromptTokensDetails(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int | None = None
    prompt_tokens_details: _PromptTokensDetails | None = None


class _Answer(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    prompt_token_ids: list[int] | None = None
    error: Any = None


class _Tokenized(msgspec.Struct):
    count: int
    max_model_len: int | None = None


class _Gathered:
    """One choice put together from an answer or from the chunks of a stream."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.token_ids: list[int] | None = None
        self.entries: list[dict[str, Any]] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.assembly = Assembly(index)

    def add(self, choice: _Choice) -> Delta:
        """Take in one piece; returns it as the harness sees it, tool-call ids still the engine's."""
        if choice.token_ids is not None:
            self.token_ids = (self.token_ids or []) + choice.token_ids
        entries = (choice.logprobs.content if choice.logprobs else None) or []
        self.entries.extend(entries)
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
        delta = self.assembly.add(choice.delta if choice.delta is not None else choice.message or {})
        delta.logprobs = entries
        return delta


class ChatApi:
    api = "chat"

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[Delta | Outcome]:
        """Yields the engine's own deltas when streaming, then one Outcome."""
        before = await self._http.version(replica)
        choices = [_Gathered(index) for index in range(job.request.n)]
        wanted = job.request.top_logprobs is not None
        seen = _Answer()
        broken = None
        try:
            async for answer in self._answers(replica, job, stream):
                seen.prompt_token_ids = seen.prompt_token_ids or answer.prompt_token_ids
                seen.usage = answer.usage or seen.usage
                for choice in answer.choices:
                    seen.prompt_token_ids = seen.prompt_token_ids or choice.prompt_token_ids
                    delta = _at(choices, choice.index).add(choice)
                    if stream and (delta.content or delta.reasoning or delta.tool_calls or (wanted and delta.logprobs)):
                        yield delta
        except VerbatimError as error:
            if not any(choice.token_ids or choice.assembly for choice in choices):
                raise
            broken = error.message
        after = await self._http.version(replica)
        yield _outcome(job, choices, seen, broken, before if before == after else None)

    async def _answers(self, replica: Replica, job: Job, stream: bool) -> AsyncIterator[_Answer]:
        body = _body(replica, job, stream)
        headers = {"x-request-id": job.call_id}
        try:
            async for answer in self._ask(replica, body, headers, job.line, stream):
                yield answer
        except (ContextTooLong, RequestError) as error:
            limit = await self._room(replica, body, error)
            job.sampling["max_tokens"] = body["max_tokens"] = limit
            async for answer in self._ask(replica, body, headers, job.line, stream):
                yield answer

    async def _ask(
        self, replica: Replica, body: dict[str, Any], headers: dict[str, str], line: Line, stream: bool
    ) -> AsyncIterator[_Answer]:
        if not stream:
            yield await self._http.post(replica, "/v1/chat/completions", body, _Answer, headers, line)
            return
        async for data in self._http.events(replica, "/v1/chat/completions", body, line, headers):
            try:
                answer = msgspec.json.decode(data, type=_Answer)
            except msgspec.DecodeError as error:
                raise EngineFailed(f"engine {replica.name} streamed something else than expected: {error}") from error
            if answer.error:
                raise EngineFailed(f"engine {replica.name} broke off: {str(answer.error)[:300]}")
            yield answer

    async def _room(self, replica: Replica, body: Mapping[str, Any], error: VerbatimError) -> int:
        """Tokens the window leaves after the prompt, when it was only max_tokens that did not fit.

        Re-raises the engine's own refusal where something else is wrong or the engine cannot count."""
        about_limit = isinstance(error, ContextTooLong) or error.param == "max_tokens" or "max_tokens" in error.message
        if "max_tokens" not in body or not about_limit:
            raise error
        question = {key: body[key] for key in ("model", "messages", "tools", "chat_template_kwargs") if key in body}
        try:
            counted = await self._http.ask(replica, "/tokenize", question, _Tokenized)
        except VerbatimError:
            raise error from None
        room = (counted.max_model_len or 0) - counted.count
        if room < 1 or room >= body["max_tokens"]:
            raise error
        return room

    async def abort(self, replica: Replica, job: Job) -> bool:
        body = {"request_ids": [f"chatcmpl-{job.call_id}"]}
        try:
            await self._http.ask(replica, "/abort_requests", body, dict[str, Any])
        except VerbatimError:
            return False
        return True


def _body(replica: Replica, job: Job, stream: bool) -> dict[str, Any]:
    body = chat_body(job.request, job.sampling)
    body["model"] = replica.model_for(job.request.model)
    body |= {"logprobs": True, "top_logprobs": job.request.top_logprobs or 0, "return_token_ids": True, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    return body


def _at(choices: Sequence[_Gathered], index: int) -> _Gathered:
    if not 0 <= index < len(choices):
        raise EngineFailed(f"the engine answered choice {index} of {len(choices)}")
    return choices[index]


def _outcome(job: Job, choices: Sequence[_Gathered], seen: _Answer, broken: str | None, version: int | None) -> Outcome:
    sampled = [_sampled(choice, job.request.top_logprobs is not None, version) for choice in choices]
    usage = seen.usage or _Usage(prompt_tokens=len(seen.prompt_token_ids or ()))
    details = usage.prompt_tokens_details
    return Outcome(
        choices=sampled,
        prompt_ids=seen.prompt_token_ids,
        prompt_tokens=usage.prompt_tokens,
        cached_tokens=(details.cached_tokens or 0) if details else 0,
        broken=broken,
        extra={"completion_tokens": usage.completion_tokens},
    )


def _sampled(choice: _Gathered, with_logprobs: bool, version: int | None) -> Sampled:
    count = len(choice.token_ids or ())
    return Sampled(
        index=choice.index,
        token_ids=choice.token_ids,
        logprobs=[entry.get("logprob") for entry in choice.entries],
        spans=(Span(version, 0, count),) if version is not None and count else (),
        finish_reason=choice.finish_reason or "abort",
        stop_reason=choice.stop_reason,
        message=choice.assembly.message(),
        logprob_content=choice.entries if with_logprobs else None,
    )
