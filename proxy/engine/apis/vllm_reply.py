"""Replies of vLLM's generate endpoint: choices put together from one answer or from a stream, and parsed by the engine.

The text of a streamed reply goes out while it is sampled (`LiveText`), as far as it is certain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any, TypeAlias

import msgspec

from proxy.dialects.base import Delta, FirstToken
from proxy.engine.apis.base import Emit, SamplingJob, chat_body, find_image_urls
from proxy.engine.apis.reply import (
    CertainText,
    EngineChoice,
    GeneratedChoice,
    PromptLogprobs,
    Usage,
    Version,
    check_entries,
    choice_at,
    cut_at_stop,
    keep_one_call,
    plain_message,
    read_named_id,
    shows_text,
    visible_ids,
)
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineAnswer, EngineHttp
from proxy.errors import RequestError, VerbatimError
from proxy.images import without_images
from reconstruct.media import Ranges, collapse, find_placeholders

GENERATE = "/inference/v1/generate"
DERENDER = "/v1/chat/completions/derender"

_TAKES_STEPS_SINCE = (0, 31)
"""The first vLLM whose derender endpoint parses the steps of a stream. Of one that hides its version the first refusal tells."""

_PROMPT_END = 8
"""Ids at the end of a prompt that show whether it opens the thoughts: all that a parser needs of it to tell the ids of tool calls."""

_encode = msgspec.json.Encoder().encode


class BareLogprob(msgspec.Struct, gc=False):
    """As much of an entry as a record needs. vLLM before 0.32 has no `token_id`, but a `token` like "token_id:123"."""

    token_id: int | msgspec.UnsetType = msgspec.UNSET
    token: str | msgspec.UnsetType = msgspec.UNSET
    logprob: float | None = None

    def read_id(self) -> int:
        """Raises EngineFailed if it names no id."""
        if self.token_id is not msgspec.UNSET:
            return self.token_id
        return read_named_id("" if self.token is msgspec.UNSET else self.token)


class Logprob(BareLogprob):
    """A whole entry, for a harness that asked for logprobs or a trainer that wants alternatives."""

    rank: int | None = None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


_logprob: Callable[[BareLogprob], float | None] = attrgetter("logprob")
_token_id: Callable[[BareLogprob], Any] = attrgetter("token_id")


class _Logprobs(msgspec.Struct):
    content: list[Logprob] | None = None


class ChoicePiece(msgspec.Struct):
    """What an answer or an event says of one choice, without its logprobs."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    weight_versions: list[Version] | None = None
    routed_experts: str | None = None


class _Piece(ChoicePiece):
    logprobs: _Logprobs | None = None
    message: dict[str, Any] | None = None


class _Placeholder(msgspec.Struct):
    offset: int
    length: int


Placeholders: TypeAlias = dict[str, list[_Placeholder]]
"""vLLM's ranges by modality."""


class GenerateAnswer(EngineAnswer):
    """A whole answer or an event of a stream. `prompt_token_ids` and `mm_placeholders` only if asked for, and in the first event."""

    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None
    prompt_token_ids: list[int] | None = None
    mm_placeholders: Placeholders | None = None


class Generated(GenerateAnswer):
    choices: list[_Piece] = msgspec.field(default_factory=list)


class _BareLogprobs(msgspec.Struct):
    content: list[BareLogprob] | None = None


class _BarePiece(ChoicePiece):
    logprobs: _BareLogprobs | None = None
    message: dict[str, Any] | None = None


class _BarelyGenerated(GenerateAnswer):
    choices: list[_BarePiece] = msgspec.field(default_factory=list)


def answer_type(job: SamplingJob) -> type[Generated]:
    """What to decode an answer as: with the alternatives of each token only if they are needed."""
    if job.wanted.top_logprobs or job.request.top_logprobs is not None:
        return Generated
    return _BarelyGenerated  # type: ignore[return-value]


def can_parse_itself(job: SamplingJob, stream: bool) -> bool:
    """Whether generate can parse this reply, too, which saves a request: a whole one, since vLLM 0.33, whose rendering says how. It names
    no tokens in its logprobs then, so none but the sampled ones' own may be wanted."""
    context = job.body.get("parse_context")
    if stream or not context or job.media or job.wanted.top_logprobs or job.request.top_logprobs is not None:
        return False
    # Where it hides thoughts it hides the ids, too.
    return context.get("include_reasoning") is True


def generate_body(replica: Replica, job: SamplingJob, stream: bool, *, parsed: bool = False) -> dict[str, Any]:
    """The rendering's generate body with the job's ids and effective sampling; always with logprobs. `parsed`: with the message."""
    sampling = {**job.body.get("sampling_params", {}), **job.sampling, **job.wanted.parameters}
    sampling["logprobs"] = job.wanted.logprobs(job.request.top_logprobs)
    if job.request.n > 1:
        sampling["n"] = job.request.n
    body = {
        **job.body,
        "token_ids": job.prompt_json,
        "sampling_params": sampling,
        "request_id": job.call_id,
        "model": job.model,
        "stream": stream,
        # A stream reports cached tokens in its last event, and only on request.
        "stream_options": {"include_usage": True} if stream else None,
        "return_token_ids": False,
    }
    if parsed:
        body["output_mode"] = "derender"
    return body | _image_fields(job) if job.media else body


# Images. A client's `features` are trusted by vLLM 0.32, hashes and ranges included, and never work with some models. So the engine is
# given the images themselves with one placeholder for each, and tells what it made of them: that must be what was planned and is recorded.
# A placeholder that was sampled would be taken for the next image's, so none is.

NEVER = -100.0
"""The logit bias of an id that must not be sampled."""


def bar_placeholders(job: SamplingJob) -> dict[str, Any]:
    """The parameters that keep the engine from sampling the ids that stand for the prompt's images."""
    given = {**job.body.get("sampling_params", {}), **job.sampling}.get("logit_bias") or {}
    return {"logit_bias": {**given, **{str(token): NEVER for token in find_placeholders(job.prompt_ids, job.media)}}}


def _image_fields(job: SamplingJob) -> dict[str, Any]:
    ids = collapse(job.prompt_ids, job.media)
    if ids is None:
        raise RequestError(PLACEHOLDER_IN_TEXT, param="messages")
    urls = find_image_urls(job.request)
    parts = [{"type": "image_url", "url": urls[digest]} for digest in job.request.images]
    return {"token_ids": ids.tolist(), "content_parts": parts, "return_token_ids": True}


PLACEHOLDER_IN_TEXT = (
    "a message's text contains the placeholder that stands for an image in the model's prompts: no image can be placed"
)


class ImageExpansion:
    """Holds what the engine reports of its prompt to the plan."""

    def __init__(self, replica: Replica, job: SamplingJob) -> None:
        self._replica = replica
        self._job = job

    def check(self, answer: GenerateAnswer) -> None:
        """Raises RequestError if the engine, whose first answer this is, samples after another prompt than was planned."""
        if answer.prompt_token_ids is None:
            raise RequestError(
                f"engine {self._replica.name} does not say where it placed the images: vLLM does since 0.30, and before it images need "
                "--engine-api chat",
                param="messages",
            )
        if answer.prompt_token_ids != self._job.prompt_ids.tolist() or read_ranges(answer.mm_placeholders) != self._job.media:
            raise RequestError(
                f"engine {self._replica.name} places the images of model '{self._job.request.model}' differently in token ids than in "
                "messages: this model's images cannot be used on the token path",
                param="messages",
            )


def read_ranges(placeholders: Placeholders | None) -> Ranges:
    """The images' ranges in their order; any other media in the prompt count, too, so that they never fit."""
    found = [(each.offset, each.length) for ranges in (placeholders or {}).values() for each in ranges]
    return tuple(sorted(found))


class PieceChoice(GeneratedChoice):
    """One choice so far, without its logprobs, of the pieces of an answer."""

    def add_piece(self, piece: ChoicePiece) -> None:
        self.token_ids.extend(piece.token_ids or ())
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason
        self.versions.extend(piece.weight_versions or ())
        self.routed_experts = piece.routed_experts or self.routed_experts


class SampledChoice(PieceChoice):
    """A choice whose ids the engine parses. `live` sends its text while it is sampled."""

    def __init__(self, index: int, live: bool) -> None:
        super().__init__(index)
        self.entries: list[Logprob] = []
        self.message: dict[str, Any] | None = None
        """As generate parsed it."""
        self.live = LiveText(index) if live else None

    def add(self, piece: _Piece) -> None:
        ids = piece.token_ids or []
        if piece.logprobs and piece.logprobs.content:
            self.entries += piece.logprobs.content
        if piece.finish_reason is None and piece.stop_reason is None and not (piece.weight_versions or piece.routed_experts):
            # What nearly every token of a stream is.
            self.token_ids += ids
        else:
            self.add_piece(piece)
        if piece.message is not None:
            self.message = piece.message
            # The chat's word for a reply with tool calls that ended by itself.
            self.finish_reason = "stop" if self.finish_reason == "tool_calls" else self.finish_reason
        if self.live is not None:
            self.live.pending += visible_ids(ids, self.finish_reason, self.stop_reason) if piece.finish_reason else ids

    @property
    def visible_ids(self) -> list[int]:
        """The ids to derender, without the stop token."""
        return visible_ids(self.token_ids, self.finish_reason, self.stop_reason)

    @property
    def names_tokens(self) -> bool:
        """Whether it is of a vLLM before 0.32, which names sampled tokens as text. It reports neither the weights nor the stop string."""
        return self.message is None and bool(self.entries) and self.entries[0].token_id is msgspec.UNSET

    def hold_version(self, version: int | None) -> None:
        """All of it was sampled under one weight version, or (None) it is not known under which."""
        self.versions = [] if version is None else [Version(version, 0, len(self.token_ids))]

    def shown_entries(self, replica: Replica, job: SamplingJob) -> list[Logprob]:
        """The entries as the harness sees them: it may have asked for fewer alternatives than the engine was, and since 0.33 vLLM returns
        one more where the sampled token is not among the likeliest."""
        if not job.wanted.top_logprobs and replica.precedes((0, 33)):
            return self.entries
        most = max(job.request.top_logprobs or 0, 1)
        return [msgspec.structs.replace(entry, top_logprobs=_first_tops(entry, most)) for entry in self.entries]

    def finish_parsed(
        self, replica: Replica, job: SamplingJob, parsed: Parsed, prompt_logprobs: PromptLogprobs | None
    ) -> EngineChoice:
        """Raises EngineFailed if the logprobs are of other tokens."""
        if self.message is None:
            named = map(BareLogprob.read_id if self.names_tokens else _token_id, self.entries)
            check_entries(self.index, self.token_ids, list(named))
        tops = None
        if job.wanted.top_logprobs:
            decoded = (msgspec.json.decode(entry.top_logprobs, type=list[BareLogprob]) for entry in self.entries)
            tops = [[(top.read_id(), top.logprob) for top in entry if top.logprob is not None] for entry in decoded]
        logprobs = list(map(_logprob, self.entries))
        return self.finish(
            replica, job.wanted, job.prompt_ids, logprobs, parsed.message, parsed.logprobs, prompt_logprobs, tops
        )


def _first_tops(entry: Logprob, most: int) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(msgspec.json.decode(entry.top_logprobs, type=list[msgspec.Raw])[:most]))


@dataclass(slots=True, eq=False)
class GeneratedReply:
    """The answer to a generate request, as it arrives. `expansion` checks the prompt's images; `emit` is told of the first token."""

    choices: list[SampledChoice]
    _expansion: ImageExpansion | None
    _emit: Emit | None
    cached_tokens: int = 0
    prompt_logprobs: PromptLogprobs | None = None
    _choice: SampledChoice | None = None
    """The last one that a piece was of."""

    def take(self, answers: list[Generated]) -> bool:
        """Add what arrived together. Whether the text of a choice is to be parsed now."""
        if self._expansion is not None:
            self._expansion.check(answers[0])
            self._expansion = None
        if self._emit is not None:
            self._emit(FirstToken())
            self._emit = None
        choice = self._choice
        for answer in answers:
            if answer.usage:
                self.cached_tokens = answer.usage.cached_tokens
            self.prompt_logprobs = answer.prompt_logprobs or self.prompt_logprobs
            for piece in answer.choices:
                if choice is None or choice.index != piece.index:
                    choice = self._choice = choice_at(self.choices, piece.index)
                choice.add(piece)
        now = time.perf_counter()
        for each in self.choices:
            live = each.live
            if live is not None and live.pending and not each.finish_reason and now >= live.next_at:
                return True
        return False


@dataclass(frozen=True, slots=True)
class Parsed:
    """The message of the sampled ids, and chat-shaped logprobs if they were asked for. Tool-call ids are the engine's."""

    message: dict[str, Any]
    logprobs: Sequence[Mapping[str, Any]] | None = None

    def name_calls(self, other: Mapping[str, Any]) -> Parsed:
        """The same with the ids of the tool calls of `other`, and with none where those are others: derender replaces those of a whole
        reply, which its model may have sampled, by random ones."""
        calls, named = self.message.get("tool_calls") or (), other.get("tool_calls") or ()
        alike = [call["function"]["name"] for call in calls] == [call["function"]["name"] for call in named]
        own = [call["id"] for call in named] if alike else [""] * len(calls)
        renamed = [{**call, "id": identifier} for call, identifier in zip(calls, own, strict=True)]
        return replace(self, message={**self.message, "tool_calls": renamed}) if renamed else self

    @property
    def lacks_ids(self) -> bool:
        """Whether it has a tool call without an id."""
        return not all(call["id"] for call in self.message.get("tool_calls") or ())


class _Derendered(msgspec.Struct):
    choices: list[dict[str, Any]]


class Parser:
    """The engine's own tool and reasoning parsers (vLLM's derender endpoint) for one job.

    They get the request's tools, tool choice and flags, but not its history. `takes_steps`: they parse a reply while it is sampled, and
    tell the ids of its tool calls."""

    def __init__(self, http: EngineHttp, replica: Replica, job: SamplingJob) -> None:
        self.takes_steps = not replica.precedes(_TAKES_STEPS_SINCE)
        self._http = http
        self._replica = replica
        self._job = job
        self._request = chat_body(job.request, {}, job.id_text, ())
        self._request.pop("n", None)
        last = job.request.engine_messages[-1:]
        self._request["messages"] = list(map(without_images, last)) if job.request.images else last

    async def parse(self, choice: SampledChoice) -> Parsed:
        """The choice's whole reply. Raises VerbatimError if the engine cannot parse its own output."""
        parsed, live = await self._parse_whole(choice), choice.live
        if live is None or (live.is_prefix_of(parsed.message) and (live.has_sent or not shows_text(parsed.message))):
            return await self.find_ids(parsed, choice, choice.visible_ids)
        # The streaming parsers decide where the text belongs, as far as they and the parse of the whole differ: also where the reply ended
        # before any of it was sent, so that a reply does not depend on how fast it came.
        try:
            await self._step(live, self._job.prompt_json, choice.finish_reason or "abort")
        except VerbatimError:
            if live.has_sent:
                raise
            return parsed.name_calls({})
        if live.agrees_with(parsed.message):
            return await self.find_ids(parsed, choice, choice.visible_ids)
        message = live.message()
        keep_one_call(message, self._job.request)
        return Parsed(message, parsed.logprobs)

    async def find_ids(self, parsed: Parsed, choice: SampledChoice, token_ids: Sequence[int]) -> Parsed:
        """`parsed` with the tool-call ids that only the streaming parsers tell. Given its reply as `token_ids`, many know markup only as
        the tokens that the tokenizer has for it; the parse of the whole knows it as text, too."""
        if not parsed.message.get("tool_calls"):
            return parsed
        if not self.takes_steps:
            return parsed.name_calls({})
        live = LiveText(choice.index, token_ids)
        end = msgspec.Raw(_encode(self._job.prompt_ids[-_PROMPT_END:].tolist()))
        try:
            await self._step(live, end, choice.finish_reason or "abort")
        except VerbatimError:
            return parsed.name_calls({})
        message = live.message()
        keep_one_call(message, self._job.request)
        return parsed.name_calls(message)

    async def advance(self, live: LiveText) -> Delta | None:
        """What the pending ids make certain, None if nothing. Raises as `parse`."""
        await self._step(live, self._job.prompt_json)
        return live.take_certain()

    async def _step(self, live: LiveText, prompt: msgspec.Raw, finish_reason: str | None = None) -> None:
        """Feed the pending ids to the streaming parsers. A `finish_reason` flushes them."""
        started = time.perf_counter()
        body = {
            "stream": True,
            "model": self._request["model"],
            "generate_chunk": {"choices": [{"index": 0, "token_ids": live.pending, "finish_reason": finish_reason}]},
            "stream_state": live.state,
            "prompt_token_ids": prompt,
            "chat_request": self._request,
        }
        step = await self._http.ask(self._replica, DERENDER, body, _Step)
        live.add_step(step, time.perf_counter() - started)

    async def _parse_whole(self, choice: SampledChoice) -> Parsed:
        wanted = self._job.request.top_logprobs is not None
        visible = choice.visible_ids
        if not choice.token_ids or not (visible or wanted):
            return Parsed({"role": "assistant", "content": ""})
        if choice.message is not None:
            message = plain_message(choice.message)
            keep_one_call(message, self._job.request)
            return Parsed(message)
        body = {
            "model": self._job.request.model,
            "generate_response": self._generate_response(choice, visible or choice.token_ids, wanted),
            "chat_request": self._request,
        }
        derendered = (await self._http.ask(self._replica, DERENDER, body, _Derendered)).choices[0]
        content = (derendered.get("logprobs") or {}).get("content") if wanted else None
        return Parsed(self._cut(derendered.get("message") or {}, choice) if visible else plain_message({}), content)

    def _cut(self, derendered: Mapping[str, Any], choice: SampledChoice) -> dict[str, Any]:
        """The message as vLLM's chat endpoint would show it; derender shows everything that was sampled."""
        message = plain_message(derendered)
        if isinstance(choice.stop_reason, str):
            keep = bool(self._job.request.forward.get("include_stop_str_in_output"))
            cut_at_stop(message, choice.stop_reason, keep=keep)
        keep_one_call(message, self._job.request)
        return message

    def _generate_response(self, choice: SampledChoice, token_ids: Sequence[int], with_logprobs: bool) -> dict[str, Any]:
        shaped: dict[str, Any] = {
            "index": 0,
            "token_ids": token_ids,
            "finish_reason": choice.finish_reason or "abort",
            "stop_reason": choice.stop_reason,
        }
        if with_logprobs:
            shaped["logprobs"] = {"content": choice.shown_entries(self._replica, self._job)}
        return {"request_id": self._job.call_id, "choices": [shaped], "prompt_token_ids": self._job.prompt_json}


class _DeltaChoice(msgspec.Struct):
    delta: dict[str, Any] = {}


class _Chunk(msgspec.Struct):
    choices: list[_DeltaChoice] = []


class _Step(msgspec.Struct):
    chunk: _Chunk
    stream_state: msgspec.Raw


_PATIENCE = 8.0
_SHORTEST_PAUSE_SECONDS = 0.2
"""Each step sends the engine the whole prompt again, and five a second are as smooth as anybody reads."""


class LiveText(CertainText):
    """The same by vLLM's derender endpoint, in steps.

    The endpoint is stateless: each step sends the state back and replays what came before, so its cost grows with the reply. The first
    step is taken at once, later ones after a pause of at least `_PATIENCE` times the last step's duration: with the first id that arrives
    then, or without one after another such pause, since the engine may have paused, too."""

    def __init__(self, index: int, pending: Sequence[int] = ()) -> None:
        super().__init__(index)
        self.pending = [*pending]
        """Ids that no step has parsed yet."""
        self.state: msgspec.Raw | None = None
        self._pause = self.next_at = 0.0
        """How long steps pause, and when the next one may be, by `time.perf_counter`."""

    @property
    def is_due(self) -> bool:
        return bool(self.pending) and time.perf_counter() >= self.next_at

    @property
    def patience(self) -> float | None:
        """For how many seconds what is pending, or comes before they are over, may wait for more; None: nothing waits."""
        left = self.next_at + self._pause - time.perf_counter()
        return max(0.0, left) if self.pending or left > 0 else None

    def add_step(self, step: _Step, seconds: float) -> None:
        """Add a step that took so long."""
        self.state, self.pending = step.stream_state, []
        self._pause = max(_SHORTEST_PAUSE_SECONDS, _PATIENCE * seconds)
        self.next_at = time.perf_counter() + self._pause
        self.add_delta(step.chunk.choices[0].delta if step.chunk.choices else {})
