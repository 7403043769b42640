"""The token path: vLLM with `--enable-scale-out`, token ids in and token ids out.

`/v1/chat/completions/render` renders messages to ids, `/inference/v1/generate` samples after exactly the ids it is given and
reports the weight version of every token, `/v1/chat/completions/derender` lets the engine's own tool and reasoning parsers shape
the message. Checked against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, Request
from proxy.engine.base import Job, Outcome, Rendered, Sampled, chat_body
from proxy.engine.generated import GENERATE, Usage, Version, generate_body, spans_of
from proxy.engine.id_text import IdText
from proxy.engine.live_text import LiveText
from proxy.engine.replica import Replica
from proxy.engine.wire import EngineHttp
from proxy.errors import EngineFailed, VerbatimError
from reconstruct.bridge import Rendering

_SESSIONS_REMEMBERED = 256
"""Sessions whose ids are remembered as text: a few megabytes for one of a hundred thousand tokens."""

_REQUEST_ID_PREFIX = "generate-tokens-"
"""What vLLM puts before the request id it was given; /abort_requests wants the whole."""


class _Logprob(msgspec.Struct):
    token_id: int
    logprob: float | None = None
    rank: int | None = None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


class _Logprobs(msgspec.Struct):
    content: list[_Logprob] | None = None


class _Choice(msgspec.Struct):
    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[Version] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    usage: Usage | None = None


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: Usage | None = None
    error: Any = None


class _Derendered(msgspec.Struct):
    choices: list[dict[str, Any]]


class _Gathered:
    """One choice, put together from one answer or from the events of a stream; `live` tells its text on the way."""

    def __init__(self, index: int, live: bool) -> None:
        self.index = index
        self.token_ids: list[int] = []
        self.entries: list[_Logprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self.versions: list[Version] = []
        self.live = LiveText(index) if live else None

    def add(self, choice: _Choice) -> None:
        new = choice.token_ids or []
        self.token_ids.extend(new)
        if choice.logprobs and choice.logprobs.content:
            self.entries.extend(choice.logprobs.content)
        self.finish_reason = choice.finish_reason or self.finish_reason
        self.stop_reason = choice.stop_reason if choice.stop_reason is not None else self.stop_reason
        self.versions.extend(choice.weight_versions or ())
        if self.live is not None:
            self.live.take(new[:-1] if self.ended_by_stop_token else new)

    @property
    def ended_by_stop_token(self) -> bool:
        """Then the last id is no text: derender would spell it out."""
        return self.finish_reason == "stop" and not isinstance(self.stop_reason, str)

    @property
    def spoken(self) -> list[int]:
        """The ids that show in the text."""
        return self.token_ids[:-1] if self.ended_by_stop_token else self.token_ids


class TokenApi:
    api = "token"

    def __init__(self, http: EngineHttp) -> None:
        self._http = http
        self._id_texts: OrderedDict[str, IdText] = OrderedDict()

    def id_text(self, session_id: str) -> IdText:
        """What is remembered of the session's ids as text; the sessions heard of last have one."""
        known = self._id_texts.setdefault(session_id, IdText())
        self._id_texts.move_to_end(session_id)
        while len(self._id_texts) > _SESSIONS_REMEMBERED:
            self._id_texts.popitem(last=False)
        return known

    async def render(self, replica: Replica, request: Request, rendering: Rendering, id_text: IdText) -> Rendered:
        """The ids of `rendering.messages` under the request's tools and template kwargs."""
        body = chat_body(request, {})
        body["messages"] = list(rendering.messages)
        body.pop("n", None)
        if not rendering.add_generation_prompt:
            body["add_generation_prompt"] = False
            # A forced tool call constrains what is sampled, not how a history reads.
            body.pop("tool_choice", None)
        answer = await self._http.ask(replica, "/v1/chat/completions/render", body, dict[str, msgspec.Raw])
        try:
            # The next history goes on from a whole rendering, not from one that was made to find where a reply ends.
            ids = id_text.read(bytes(answer.pop("token_ids", b"")), remember=rendering.add_generation_prompt)
            return Rendered(ids, {name: msgspec.json.decode(value) for name, value in answer.items()})
        except msgspec.DecodeError as error:
            raise EngineFailed(f"engine {replica.name} rendered no token_ids") from error

    async def count(self, replica: Replica, request: Request) -> int:
        rendered = await self.render(replica, request, Rendering(request.messages, True), IdText())
        return len(rendered.ids)

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[Delta | Outcome]:
        """Yields deltas while streaming, as far as the engine's parsers are certain of them, then one Outcome."""
        choices = [_Gathered(index, _goes_live(job, stream)) for index in range(job.request.n)]
        broken = None
        usage = Usage()
        if stream:
            try:
                async for delta in self._stream(replica, job, choices, usage):
                    yield delta
            except VerbatimError as error:
                if not any(choice.token_ids for choice in choices):
                    raise
                broken = error.message
        else:
            answer = await self._http.post(replica, GENERATE, generate_body(replica, job, False), _Generated, line=job.line)
            _gather(choices, answer.choices)
            usage.take(answer.usage)
        outcome = await self._outcome(replica, job, choices, broken, usage.cached_tokens)
        for choice, sampled in zip(choices, outcome.choices, strict=True):
            # Of a broken reply nothing more is told: before its first word the harness still gets a status of its own.
            live = choice.live if outcome.broken is None else None
            rest = live.rest(sampled.message) if live is not None else None
            if rest is not None:
                yield rest
        yield outcome

    async def _stream(self, replica: Replica, job: Job, choices: list[_Gathered], usage: Usage) -> AsyncIterator[Delta]:
        prompt_ids, chat_request = job.prompt_json, _parser_request(job)
        async for data in self._http.events(replica, GENERATE, generate_body(replica, job, True), job.line):
            event = _event(replica, data)
            usage.take(event.usage)
            for choice in _gather(choices, event.choices):
                if choice.live is not None and choice.live.due and not choice.finish_reason:
                    async with job.line.aside():
                        delta = await choice.live.step(self._http, replica, prompt_ids, chat_request, None)
                    if delta is not None:
                        yield delta

    async def abort(self, replica: Replica, job: Job) -> bool:
        body = {"request_ids": [_REQUEST_ID_PREFIX + job.call_id]}
        try:
            await self._http.ask(replica, "/abort_requests", body, dict[str, Any])
        except VerbatimError:
            return False
        return True

    async def _outcome(self, replica: Replica, job: Job, choices: list[_Gathered], broken: str | None, cached: int) -> Outcome:
        told = await self._told(replica, job, choices)
        messages = []
        for choice, item in zip(choices, told, strict=True):
            if isinstance(item, VerbatimError):
                # The tokens are sampled and will be recorded, though nobody can say what they mean.
                broken, item = broken or item.message, ({"role": "assistant", "content": ""}, None)
            elif isinstance(item, BaseException):
                raise item
            if choice.live is not None and not choice.live.extends_to(item[0]):
                # The harness has read it already: the reply is what it was told.
                item = choice.live.message(), item[1]
            messages.append(item)
        assert job.prompt_ids is not None
        sampled = [
            Sampled(
                index=choice.index,
                token_ids=choice.token_ids,
                logprobs=[entry.logprob for entry in choice.entries],
                spans=spans_of(replica, choice.versions),
                finish_reason=choice.finish_reason or "abort",
                stop_reason=choice.stop_reason,
                message=message,
                logprob_content=content,
            )
            for choice, (message, content) in zip(choices, messages, strict=True)
        ]
        return Outcome(sampled, None, len(job.prompt_ids), cached, broken)

    async def _told(self, replica: Replica, job: Job, choices: list[_Gathered]) -> list[Any]:
        """What `_derender` says of each choice, or why it says nothing."""
        try:
            async with job.line.aside():
                asked = (self._derender(replica, job, choice) for choice in choices)
                told: list[Any] = await asyncio.gather(*asked, return_exceptions=True)
                return told
        except EngineFailed as error:
            return [error for _ in choices]

    async def _derender(
        self, replica: Replica, job: Job, choice: _Gathered
    ) -> tuple[dict[str, Any], Sequence[Mapping[str, Any]] | None]:
        """The message the engine's parsers make of the sampled ids, and chat-shaped logprobs where they were asked for."""
        wanted = job.request.top_logprobs is not None
        spoken = choice.spoken
        if not choice.token_ids or not (spoken or wanted):
            return {"role": "assistant", "content": ""}, None
        body = {
            "model": job.request.model,
            "generate_response": self._generate_response(job, choice, spoken or choice.token_ids, wanted),
            "chat_request": _parser_request(job),
        }
        answer = await self._http.ask(replica, "/v1/chat/completions/derender", body, _Derendered)
        derendered = answer.choices[0]
        message = plain_message(derendered.get("message") or {}) if spoken else {"role": "assistant", "content": ""}
        if isinstance(choice.stop_reason, str):
            cut_at_stop(message, choice.stop_reason)
        if job.request.forward.get("parallel_tool_calls") is False and message.get("tool_calls"):
            # vLLM's chat endpoint shows the first call alone then; derender shows what was sampled.
            message["tool_calls"] = message["tool_calls"][:1]
        content = (derendered.get("logprobs") or {}).get("content") if wanted else None
        return message, content

    def _generate_response(self, job: Job, choice: _Gathered, token_ids: Sequence[int], with_logprobs: bool) -> dict[str, Any]:
        shaped: dict[str, Any] = {
            "index": 0,
            "token_ids": token_ids,
            "finish_reason": choice.finish_reason or "abort",
            "stop_reason": choice.stop_reason,
        }
        if with_logprobs:
            shaped["logprobs"] = {"content": choice.entries}
        return {"request_id": job.call_id, "choices": [shaped], "prompt_token_ids": job.prompt_json}


def _event(replica: Replica, data: bytes) -> _Event:
    """One event of a stream. Raises EngineFailed when it is vLLM's word that the engine failed, or no event at all."""
    try:
        event = msgspec.json.decode(data, type=_Event)
    except msgspec.DecodeError as error:
        raise EngineFailed(f"engine {replica.name} streamed something else than expected: {error}") from error
    if event.error:
        raise EngineFailed(f"engine {replica.name} broke off: {str(event.error)[:300]}")
    return event


def _goes_live(job: Job, stream: bool) -> bool:
    """Whether text may go out while it is sampled. A stop string is cut from the whole text, and logprobs belong to it: then the
    reply waits for its end."""
    return stream and not job.sampling.get("stop") and job.request.top_logprobs is None


def _gather(choices: list[_Gathered], pieces: Sequence[_Choice]) -> list[_Gathered]:
    """The choices that got something."""
    for piece in pieces:
        if not 0 <= piece.index < len(choices):
            raise EngineFailed(f"the engine answered choice {piece.index} of {len(choices)}")
        choices[piece.index].add(piece)
    return [choices[piece.index] for piece in pieces]


def _parser_request(job: Job) -> dict[str, Any]:
    """What the engine's parsers need of the request: tools, choice and flags, but not the history."""
    body = chat_body(job.request, {})
    body.pop("n", None)
    body["messages"] = job.request.messages[-1:]
    return body


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's assistant message with the fields harnesses know: content, reasoning_content, tool_calls."""
    plain: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    reasoning = message.get("reasoning_content") or message.get("reasoning")
    if reasoning:
        plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if plain["content"] is None and not calls:
        plain["content"] = ""
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    return {
        "id": call.get("id") or "",
        "type": "function",
        "function": {"name": function.get("name") or "", "arguments": function.get("arguments") or ""},
    }


def cut_at_stop(message: dict[str, Any], stop: str) -> None:
    """Drop the stop string and what follows from the text that holds it: the ids keep it, the harness's text does not."""
    for field in ("content", "reasoning_content"):
        text = message.get(field)
        if text and stop in text:
            message[field] = text[: text.rindex(stop)]
            return
