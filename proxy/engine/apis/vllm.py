"""vLLM's token routes (from 0.30 on with `--enable-scale-out`): token ids in, token ids out, and a weight version for every token.

`/inference/v1/generate` samples after exactly the ids it is given. Messages are rendered to ids by `/v1/chat/completions/render`, and
sampled ids parsed by the engine's own tool and reasoning parsers at `/v1/chat/completions/derender`. A request with a prompt in place
of messages uses `/v1/completions/render` and `/v1/completions/derender`, and generate returns the text itself
(`output_mode: text`), with stop strings held back and cut.

Before 0.32 generate tells less. The weight version is then the replica's before the call if it still is after it, otherwise unknown; the
stop string that ended a reply is found in its text; and the text after a prompt is sampled by `/v1/completions`. Since 0.33 generate parses
a whole reply itself (`output_mode: derender`). Run on vLLM 0.29, 0.31, 0.32 and 0.33; 0.24 and 0.26 by their source.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from proxy.dialects.base import Delta, FirstToken, Request
from proxy.engine.apis import vllm_plugin
from proxy.engine.apis.base import Emit, EngineKind, SamplingJob, chat_body
from proxy.engine.apis.chat import OpenAiChat
from proxy.engine.apis.completions import prove_prompt
from proxy.engine.apis.json_text import IdText
from proxy.engine.apis.probe import Probe
from proxy.engine.apis.renderer import SEED_IDS, LocalRenderer, Rendered, Tokenizer
from proxy.engine.apis.reply import EngineChoice, EngineReply, PartialReply, PromptLogprobs, choice_at, is_visible
from proxy.engine.apis.scores import Scored, ScoringJob
from proxy.engine.apis.versions import Versions
from proxy.engine.apis.vllm_reply import (
    DERENDER,
    GENERATE,
    ChoicePiece,
    GenerateAnswer,
    GeneratedReply,
    ImageExpansion,
    Parsed,
    Parser,
    PieceChoice,
    Placeholders,
    SampledChoice,
    answer_type,
    bar_placeholders,
    can_parse_itself,
    generate_body,
    read_ranges,
)
from proxy.engine.apis.vllm_scores import score_by_generate, score_by_plugin
from proxy.engine.in_vllm.frames import ABORT
from proxy.engine.replica import Replica, parse_version
from proxy.engine.wire.http import EngineHttp
from proxy.engine.wire.refusals import EngineError
from proxy.errors import ContextTooLong, EngineFailed, RequestError, VerbatimError
from proxy.timeline import INTERPRET, CancelScope, Within
from reconstruct.errors import IdOutOfRange
from reconstruct.prompt import Rendering
from reconstruct.records import Ids

_RENDER = "/v1/chat/completions/render"
_PROMPT_RENDER = "/v1/completions/render"
_PROMPT_DERENDER = "/v1/completions/derender"

TOKEN_ROUTES = (GENERATE, _RENDER, DERENDER)
_FLAG_SINCE = (0, 30)
"""The first vLLM with `--enable-scale-out`. From 0.24 to it the routes are there without a flag."""

_TELLS_ALL_SINCE = (0, 32)
"""The first vLLM whose generate route returns text on request, and says which weights it sampled under and what ended a reply."""


class VllmTokens(EngineKind):
    name = "token"
    detection_order = 10
    takes_images = True
    versions = (Versions("vLLM", run=("0.29", "0.31", "0.32", "0.33"), first="0.24", last="0.33"),)

    def __init__(self, http: EngineHttp, local: LocalRenderer) -> None:
        super().__init__(http, local)
        self._chat = OpenAiChat(http, local)

    async def detect(self, probe: Probe, *, asked: bool) -> str | None:
        missing = await probe.find_missing(*TOKEN_ROUTES)
        if not missing:
            return None
        version = parse_version((await self.read_version(probe))[0]) or _FLAG_SINCE
        if version < _FLAG_SINCE:
            return f"it has no {missing[0]}, which vLLM has since 0.24: upgrade it, or use the chat API"
        return f"it has no {missing[0]}; start vLLM with --enable-scale-out, or use the chat API"

    async def render(self, replica: Replica, request: Request, rendering: Rendering, id_text: IdText) -> Rendered:
        body = chat_body(request, {}, id_text, rendering.messages)
        body.pop("n", None)
        if request.images:
            # Without what the processor makes of them: the engine is given the images again.
            body["mm_payload"] = "none"
        if not rendering.add_generation_prompt:
            body["add_generation_prompt"] = False
            # A forced tool call constrains what is sampled, not how a history is rendered.
            body.pop("tool_choice", None)
        answer = await self._http.ask(replica, _RENDER, body, dict[str, msgspec.Raw])
        # The next history continues a whole rendering, not one made to find where a reply ends.
        return _read_rendered(replica, answer, id_text, remember=rendering.add_generation_prompt)

    def tokenizer(self, replica: Replica, request: Request, id_text: IdText) -> Tokenizer:
        return _Tokenizer(self._http, replica, request, id_text)

    async def count(self, replica: Replica, request: Request) -> int:
        if request.prompt is None:
            return len((await self.render(replica, request, Rendering(request.engine_messages, True), IdText())).ids)
        if isinstance(request.prompt, str):
            return len((await self.tokenizer(replica, request, IdText()).tokenize(request.prompt, whole=True)).ids)
        return len(request.prompt)

    async def spell(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        return await self.spell_itself(replica, groups)

    async def spell_itself(self, replica: Replica, groups: Sequence[tuple[int, ...]]) -> list[str]:
        model = replica.name_served(replica.models[0] if replica.models else "")
        # On its own a word loses its leading blank where the tokenizer marks blanks at the start of words.
        return await _spell(self._http, replica, model, groups, before=[0])

    def parameters(self, request: Request, body: Mapping[str, Any], sampling: Mapping[str, Any]) -> dict[str, Any]:
        # The rendering says what vLLM makes of the request, a grammar for its tools included.
        return {**body.get("sampling_params", {}), **sampling}

    def plans(self, replica: Replica, request: Request) -> bool:
        # Where a prompt of text goes on is found by spelling ids, for which the plugin has no route.
        return replica.plugin and request.prompt is None

    def way_out(self, replica: Replica) -> str:
        plugin = "start vLLM without VLLM_PLUGINS=verbatim or with this release's plugin, " if replica.plugin else ""
        return plugin + super().way_out(replica)

    async def find_plugin(self, probe: Probe, replica: Replica) -> bool:
        return await vllm_plugin.find_plugin(self._http, probe, replica)

    async def sample(self, replica: Replica, job: SamplingJob, *, stream: bool, emit: Emit) -> EngineReply:
        if replica.plugin:
            return await vllm_plugin.sample(self._http, replica, job, stream=stream, emit=emit)
        if job.request.prompt is None:
            if can_parse_itself(job, stream):
                try:
                    return await self._sample_messages(replica, job, stream, emit, parsed=True)
                except (RequestError, EngineError):
                    # Of a reply that cannot be parsed this tells no token: it is sampled again. A request that is refused is refused again.
                    job.scope.redial()
            return await self._sample_messages(replica, job, stream, emit)
        if _samples_by_completions(replica, job):
            return await self._sample_completion(replica, job, stream, emit)
        return await self._sample_text(replica, job, stream, emit)

    async def score(self, replica: Replica, job: ScoringJob, scope: CancelScope) -> Scored:
        by = score_by_plugin if replica.plugin else score_by_generate
        return await by(self._http, replica, job, scope)

    async def abort(self, replica: Replica, job: SamplingJob, *, again: bool) -> bool:
        if _samples_by_completions(replica, job):
            return await self._chat.abort(replica, job, again=again)
        # vLLM prefixes the request id it is given, and wants all of it.
        path = ABORT if replica.plugin else "/abort_requests"
        return await self._abort_request(replica, f"generate-tokens-{job.call_id}", path, again=again)

    async def _sample_messages(
        self, replica: Replica, job: SamplingJob, stream: bool, emit: Emit, *, parsed: bool = False
    ) -> EngineReply:
        """Emits deltas as far as the engine's parsers are certain of them. `parsed`: generate parses the reply."""
        adjusted = bar_placeholders(job) if job.media else {}
        if adjusted:
            job = msgspec.structs.replace(job, sampling={**job.sampling, **adjusted})
        # A stop string is cut from the whole text, and logprobs belong to it: then the text waits for the end.
        parser, before = Parser(self._http, replica, job), replica.host.weight_version
        live = stream and parser.takes_steps and not job.sampling.get("stop") and job.request.top_logprobs is None
        choices = [SampledChoice(index, live) for index in range(job.request.n)]
        streams = _can_stream(replica, job, stream)
        body = generate_body(replica, job, streams, parsed=parsed)
        reply = GeneratedReply(choices, ImageExpansion(replica, job) if job.media else None, emit if stream else None)
        with PartialReply(choices) as reading:
            async with self._http.receive(replica, GENERATE, body, answer_type(job), job.scope, stream=streams) as answers:
                while not answers.ended:
                    await answers.follow(reply.take, _patience(choices))
                    await self._emit_live(job, parser, choices, emit)
        if any(choice.names_tokens for choice in choices):
            version = await self._http.find_version(replica, before, job.scope)
            for choice in choices:
                choice.hold_version(version)
        outcome = await self._interpret(replica, job, parser, reply, reading.broken)
        for choice, sampled in zip(choices, outcome.choices, strict=True):
            # The rest of a broken reply is not sent.
            if choice.live is not None and outcome.broken is None:
                rest = choice.live.take_rest(sampled.message)
                if rest is not None:
                    emit([rest])
        outcome.adjusted = adjusted
        return outcome

    async def _emit_live(self, job: SamplingJob, parser: Parser, choices: list[SampledChoice], emit: Emit) -> None:
        """Parse what has arrived of the choices whose next step is due."""
        for choice in choices:
            if choice.live is None or choice.finish_reason or not choice.live.is_due:
                continue
            try:
                with Within(INTERPRET):
                    async with job.scope.limit():
                        delta = await parser.advance(choice.live)
            except VerbatimError:
                if choice.live.state is not None:
                    raise
                # It parses no steps: the reply is parsed when it is whole.
                parser.takes_steps, choice.live = False, None
                continue
            if delta is not None:
                emit([delta])

    async def _interpret(
        self,
        replica: Replica,
        job: SamplingJob,
        parser: Parser,
        reply: GeneratedReply,
        broken: str | None,
    ) -> EngineReply:
        """The choices with their messages. Choices that cannot be parsed are recorded without one."""
        sampled = []
        for choice, parsed in zip(reply.choices, await self._parse(replica, job, parser, reply.choices), strict=True):
            if isinstance(parsed, VerbatimError):
                broken, parsed = broken or parsed.message, Parsed({"role": "assistant", "content": ""})
            elif isinstance(parsed, BaseException):
                raise parsed
            sampled.append(choice.finish_parsed(replica, job, parsed, reply.prompt_logprobs))
        return EngineReply(sampled, None, len(job.prompt_ids), reply.cached_tokens, broken)

    async def _parse(
        self, replica: Replica, job: SamplingJob, parser: Parser, choices: list[SampledChoice]
    ) -> Sequence[Parsed | BaseException]:
        """Each choice's message, or why it cannot be had."""
        try:
            with Within(INTERPRET):
                async with job.scope.limit():
                    if len(choices) == 1:
                        return [await self._parse_one(replica, job, parser, choices[0])]
                    parsing = (self._parse_one(replica, job, parser, choice) for choice in choices)
                    return await asyncio.gather(*parsing, return_exceptions=True)
        except VerbatimError as error:
            return [error for _ in choices]

    async def _parse_one(self, replica: Replica, job: SamplingJob, parser: Parser, choice: SampledChoice) -> Parsed:
        """Also asks for the text, where a call of a tool may be unfinished in it: the parsers do not tell."""
        if choice.names_tokens and choice.finish_reason == "stop":
            await self._find_stop(replica, job, choice)
        parsing = parser.parse(choice)
        if job.request.offers_calls and choice.finish_reason == "stop":
            parsed, _ = await asyncio.gather(parsing, self._spell_sampled(replica, job, choice))
        else:
            parsed = await parsing
        if not (parsed.lacks_ids and parser.takes_steps):
            return parsed
        return await self._find_spelled_ids(replica, job, parser, choice, parsed)

    async def _find_stop(self, replica: Replica, job: SamplingJob, choice: SampledChoice) -> None:
        """Set the stop string that ended the choice, if one did, where the engine does not report it."""
        sampling = {**job.body.get("sampling_params", {}), **job.sampling}
        stops = sampling.get("stop") or []
        if not stops:
            return
        ids = choice.token_ids
        groups = [ids, ids[:-1]] if len(ids) > 1 else [ids]
        # A stop token is no text for stop strings, and special tokens are only where they are not skipped, as for many tool parsers.
        special = not sampling.get("skip_special_tokens", True)
        text, *before = await _spell(self._http, replica, job.request.model, groups, before=[0], special=special)
        choice.stop_reason = find_stop([stops] if isinstance(stops, str) else stops, text, "".join(before))

    async def _spell_sampled(self, replica: Replica, job: SamplingJob, choice: SampledChoice) -> None:
        with contextlib.suppress(VerbatimError):
            (choice.sampled_text,) = await _spell(self._http, replica, job.request.model, [choice.token_ids], before=[0])

    async def _find_spelled_ids(
        self, replica: Replica, job: SamplingJob, parser: Parser, choice: SampledChoice, parsed: Parsed
    ) -> Parsed:
        """The same with the ids of tool calls whose markup the model spelled: tokenized again, its text has the tokens that the streaming
        parsers know. None of these ids is recorded or sampled after."""
        model, ids = job.request.model, choice.visible_ids
        try:
            (text,) = await _spell(self._http, replica, model, [ids], before=[0])
            body = {"model": model, "prompt": text, "add_special_tokens": False, "max_tokens": 1}
            (tokenized,) = await self._http.ask(replica, _PROMPT_RENDER, body, list[_Tokenized])
        except (VerbatimError, ValueError):
            return parsed
        return parsed if tokenized.token_ids == ids else await parser.find_ids(parsed, choice, tokenized.token_ids)

    async def _sample_text(self, replica: Replica, job: SamplingJob, stream: bool, emit: Emit) -> EngineReply:
        """Emits the engine's own pieces of text."""
        choices = [_TextChoice(index, job.request.top_logprobs or 0) for index in range(job.request.n)]
        cached, prompt_logprobs, begun = 0, None, not stream
        streams = _can_stream(replica, job, stream)
        body = generate_body(replica, job, streams) | {"output_mode": "text"}
        # Here alternatives come as text without ids, which cannot be recorded: request only those the harness asked for.
        body["sampling_params"]["logprobs"] = job.request.top_logprobs or 0

        def take(answers: list[_TextAnswer]) -> None:
            nonlocal cached, prompt_logprobs, begun
            if not begun:
                begun = True
                emit(FirstToken())
            deltas: list[Delta] = []
            try:
                for answer in answers:
                    cached = answer.usage.cached_tokens if answer.usage else cached
                    prompt_logprobs = answer.prompt_logprobs or prompt_logprobs
                    for piece in answer.choices:
                        delta = choice_at(choices, piece.index).add(piece)
                        if stream and is_visible(job.request, delta):
                            deltas.append(delta)
            finally:
                if deltas:
                    emit(deltas)

        with PartialReply(choices) as reading:
            async with self._http.receive(replica, GENERATE, body, _TextAnswer, job.scope, stream=streams) as answers:
                await answers.follow(take)
        sampled = [choice.finish_text(replica, job, prompt_logprobs) for choice in choices]
        return EngineReply(sampled, None, len(job.prompt_ids), cached, reading.broken)

    async def _sample_completion(self, replica: Replica, job: SamplingJob, stream: bool, emit: Emit) -> EngineReply:
        """As `_sample_text`, by `/v1/completions`. Raises EngineFailed if it sampled after other ids than it was given."""
        given = msgspec.structs.replace(job, request=replace(job.request, prompt=job.prompt_ids.tolist()))
        outcome = await self._chat.sample(replica, given, stream=stream, emit=emit)
        prove_prompt(job, None if outcome.prompt_ids is None else outcome.prompt_ids.tolist())
        return outcome


def _samples_by_completions(replica: Replica, job: SamplingJob) -> bool:
    """Whether the text after a prompt is had from `/v1/completions`."""
    return job.request.prompt is not None and replica.precedes(_TELLS_ALL_SINCE)


def find_stop(stops: Sequence[str], text: str, before: str) -> str | None:
    """The stop string that the last token of `text` completed first, as vLLM finds it; `before` is the text without that token."""
    clean = before.rstrip("\ufffd")
    known = len(clean) if text.startswith(clean) else 0
    found = ((text.find(stop, max(0, known - len(stop) + 1)), place, stop) for place, stop in enumerate(stops) if stop)
    return min(((at + len(stop), place, stop) for at, place, stop in found if at >= 0), default=(0, 0, None))[2]


def _patience(choices: Sequence[SampledChoice]) -> float | None:
    """For how many seconds to wait for more of the reply, before what has arrived is parsed without it; None: for ever."""
    shortest: float | None = None
    for choice in choices:
        patience = None if choice.live is None or choice.finish_reason else choice.live.patience
        if patience is not None and (shortest is None or patience < shortest):
            shortest = patience
    return shortest


def _can_stream(replica: Replica, job: SamplingJob, stream: bool) -> bool:
    """Whether to ask the engine for a stream. Only whole answers carry prompt logprobs, and before 0.32 a stream of several choices
    breaks off where they do not all begin at once."""
    older = replica.precedes(_TELLS_ALL_SINCE)
    return stream and not job.wanted.prompt_logprobs and not (older and job.request.n > 1)


class _Features(msgspec.Struct):
    mm_placeholders: Placeholders = {}


class _TextLogprobs(msgspec.Struct):
    content: list[dict[str, Any]] | None = None


class _TextPiece(ChoicePiece):
    text: str | None = None
    logprobs: _TextLogprobs | None = None


class _TextAnswer(GenerateAnswer):
    choices: list[_TextPiece] = msgspec.field(default_factory=list)


class _TextChoice(PieceChoice):
    """A choice whose text the engine returns."""

    def __init__(self, index: int, most: int) -> None:
        """`most`: how many alternatives of a token are shown; vLLM may return one more."""
        super().__init__(index)
        self._most = max(most, 1)
        self._text: list[str] = []
        self._entries: list[dict[str, Any]] = []

    def add(self, piece: _TextPiece) -> Delta:
        if piece.text is None:
            raise EngineFailed(
                "the engine returned no text after a prompt, as vLLM before 0.32 does: --engine-api chat takes prompts"
            )
        self.add_piece(piece)
        told = (piece.logprobs.content if piece.logprobs else None) or []
        entries = [{**entry, "top_logprobs": (entry.get("top_logprobs") or [])[: self._most]} for entry in told]
        self._text.append(piece.text)
        self._entries.extend(entries)
        return Delta(self.index, piece.text, logprobs=entries, token_ids=piece.token_ids or [])

    def finish_text(self, replica: Replica, job: SamplingJob, prompt_logprobs: PromptLogprobs | None) -> EngineChoice:
        logprobs = [entry.get("logprob") for entry in self._entries]
        message = {"role": "assistant", "content": "".join(self._text)}
        content = self._entries if job.request.top_logprobs is not None else None
        return self.finish(replica, job.wanted, job.prompt_ids, logprobs, message, content, prompt_logprobs)


class _Tokenizer:
    def __init__(self, http: EngineHttp, replica: Replica, request: Request, id_text: IdText) -> None:
        self._http = http
        self._replica = replica
        self._request = request
        self._id_text = id_text

    async def tokenize(self, text: str, *, whole: bool) -> Rendered:
        answer = await self._render({"prompt": text} if whole else {"prompt": text, "add_special_tokens": False})
        return _read_rendered(self._replica, answer, self._id_text, remember=whole)

    async def parameters(self, prompt_ids: Sequence[int]) -> dict[str, Any]:
        # They do not depend on the ids, and one id is less to send than all.
        answer = await self._render({"prompt": list(prompt_ids[-1:])})
        answer.pop("token_ids", None)
        return _decode_fields(answer)

    async def spell(self, before: Ids, ids: Ids) -> str:
        return (await _spell(self._http, self._replica, self._request.model, [ids.tolist()], before[-SEED_IDS:].tolist()))[0]

    async def _render(self, fields: Mapping[str, Any]) -> dict[str, msgspec.Raw]:
        # The real limit is set once the ids are known; the API's default would be subtracted from the window.
        body = {**self._request.forward, "model": self._request.model, "max_tokens": 1, **fields}
        try:
            (answer,) = await self._http.ask(self._replica, _PROMPT_RENDER, body, list[dict[str, msgspec.Raw]])
        except ContextTooLong as error:
            error.param = "prompt"
            raise
        except ValueError as error:
            raise EngineFailed(f"engine {self._replica.name} rendered one prompt as several") from error
        return answer


class _Tokenized(msgspec.Struct):
    token_ids: list[int]


class _Spelled(msgspec.Struct):
    text: str = ""


class _Derendered(msgspec.Struct):
    choices: list[_Spelled]


async def _spell(
    http: EngineHttp, replica: Replica, model: str, groups: Sequence[Sequence[int]], before: list[int], *, special: bool = True
) -> list[str]:
    """The text of each group as it follows the ids `before`, with or without `special` tokens. vLLM 0.26 and older leaves them out, and one
    before 0.32 the blank that a first word may begin with."""
    body = {
        "model": model,
        "generate_responses": [{"choices": [{"index": at, "token_ids": list(ids)} for at, ids in enumerate(groups)]}],
        "prompt_token_ids": [before],
        "completion_request": {"model": model, "prompt": "?", "skip_special_tokens": not special},
    }
    return [choice.text for choice in (await http.ask(replica, _PROMPT_DERENDER, body, _Derendered)).choices]


def _read_rendered(replica: Replica, answer: dict[str, msgspec.Raw], id_text: IdText, *, remember: bool) -> Rendered:
    try:
        ids = id_text.read(bytes(answer.pop("token_ids", b"")), remember=remember)
        features = msgspec.json.decode(answer.pop("features", msgspec.Raw(b"null")), type=_Features | None)
        media = () if features is None else read_ranges(features.mm_placeholders)
        return Rendered(ids, _decode_fields(answer), media=media)
    except (msgspec.DecodeError, IdOutOfRange) as error:
        raise EngineFailed(f"engine {replica.name} rendered no token_ids: {error}") from error


def _decode_fields(answer: Mapping[str, msgspec.Raw]) -> dict[str, Any]:
    return dict(zip(answer, map(msgspec.json.decode, answer.values()), strict=True))
