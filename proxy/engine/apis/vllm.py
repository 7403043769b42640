"""The token path: vLLM with `--enable-scale-out`, token ids in and token ids out.

`/v1/chat/completions/render` renders messages to ids, `/inference/v1/generate` samples after exactly the ids it is given and
reports the weight version of every token, `/v1/chat/completions/derender` lets the engine's own tool and reasoning parsers shape
the message. Checked against vLLM 0.32.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis.base import Job, Outcome, Rendered, chat_body, check_heard
from proxy.engine.apis.details import PromptLogprobs
from proxy.engine.apis.id_text import IdText
from proxy.engine.apis.vllm_reply import (
    GENERATE,
    Parsed,
    Parser,
    SampledChoice,
    Usage,
    answer_type,
    gather,
    generate_body,
    streamed,
)
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineFailed, VerbatimError
from proxy.timeline import INTERPRET, Within
from reconstruct.bridge import Rendering
from reconstruct.errors import IdOutOfRange

_REQUEST_ID_PREFIX = "generate-tokens-"
"""What vLLM puts before the request id it was given; /abort_requests wants the whole."""


class TokenApi:
    api = "token"

    def __init__(self, http: EngineHttp) -> None:
        self._http = http

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
        except (msgspec.DecodeError, IdOutOfRange) as error:
            raise EngineFailed(f"engine {replica.name} rendered no token_ids: {error}") from error

    async def count(self, replica: Replica, request: Request) -> int:
        rendered = await self.render(replica, request, Rendering(request.messages, True), IdText())
        return len(rendered.ids)

    async def sample(self, replica: Replica, job: Job, *, stream: bool) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Streaming, yields FirstToken and deltas as far as the engine's parsers are certain of them; then one Outcome."""
        choices = [SampledChoice(index, _goes_live(job, stream)) for index in range(job.request.n)]
        parser = Parser(self._http, replica, job)
        usage, given, broken, begun = Usage(), None, None, not stream
        streams = streamed(job, stream)
        body, told = generate_body(replica, job, streams), answer_type(job)
        try:
            async for answer in self._http.answers(replica, GENERATE, body, told, job.line, stream=streams):
                usage.take(answer.usage)
                given = answer.prompt_logprobs or given
                if not begun:
                    begun = True
                    yield FirstToken()
                for choice in gather(choices, answer.choices):
                    delta = await self._live(job, parser, choice)
                    if delta is not None:
                        yield delta
        except VerbatimError as error:
            if not any(choice.token_ids for choice in choices):
                raise
            broken = error.message
        else:
            check_heard(choices)
        outcome = await self._outcome(replica, job, parser, choices, given, broken, usage.cached_tokens)
        for choice, sampled in zip(choices, outcome.choices, strict=True):
            # Of a broken reply nothing more is told.
            live = choice.live if outcome.broken is None else None
            rest = live.rest(sampled.message) if live is not None else None
            if rest is not None:
                yield rest
        yield outcome

    async def _live(self, job: Job, parser: Parser, choice: SampledChoice) -> Delta | None:
        """What is certain of the text by now, where it is told on the way and it is time to ask."""
        if choice.live is None or choice.finish_reason or not choice.live.due:
            return None
        with Within(INTERPRET):
            async with job.line.aside():
                return await parser.step(choice.live)

    async def abort(self, replica: Replica, job: Job) -> bool:
        body = {"request_ids": [_REQUEST_ID_PREFIX + job.call_id]}
        try:
            await self._http.ask(replica, "/abort_requests", body, dict[str, Any])
        except VerbatimError:
            return False
        return True

    async def _outcome(
        self,
        replica: Replica,
        job: Job,
        parser: Parser,
        choices: list[SampledChoice],
        given: PromptLogprobs | None,
        broken: str | None,
        cached: int,
    ) -> Outcome:
        sampled = []
        for choice, parsed in zip(choices, await self._parsed(job, parser, choices), strict=True):
            if isinstance(parsed, VerbatimError):
                # The tokens are sampled and will be recorded, though nobody can say what they mean.
                broken, parsed = broken or parsed.message, Parsed({"role": "assistant", "content": ""})
            elif isinstance(parsed, Exception):
                raise parsed
            sampled.append(choice.sampled(replica, job, parsed, given))
        assert job.prompt_ids is not None
        return Outcome(sampled, None, len(job.prompt_ids), cached, broken)

    async def _parsed(self, job: Job, parser: Parser, choices: list[SampledChoice]) -> Sequence[Parsed | Exception]:
        """What each choice says, or why that is not known."""
        try:
            with Within(INTERPRET):
                async with job.line.aside():
                    if len(choices) == 1:
                        return [await _told(parser, choices[0])]
                    return await asyncio.gather(*(_told(parser, choice) for choice in choices))
        except EngineFailed as error:
            return [error for _ in choices]


async def _told(parser: Parser, choice: SampledChoice) -> Parsed | Exception:
    try:
        return await parser.told(choice)
    except Exception as error:
        return error


def _goes_live(job: Job, stream: bool) -> bool:
    """Whether text may go out while it is sampled. A stop string is cut from the whole text, and logprobs belong to it: then the
    reply waits for its end."""
    return stream and not job.sampling.get("stop") and job.request.top_logprobs is None
