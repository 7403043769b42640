"""SampledChoice: one choice of vLLM's generate endpoint, put together from one answer or from the events of a stream."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import msgspec

from proxy.dialects.base import Delta, Request
from proxy.dialects.fields import UNPARSED, arguments_object
from proxy.engine.apis.base import Assembly, Job, Sampled, at, chat_body, check_entries, spoken
from proxy.engine.apis.details import PromptLogprobs, details_of
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp, Told
from reconstruct.records import Span


class BareLogprob(msgspec.Struct, gc=False):
    """As much of an entry as a record needs."""

    token_id: int
    logprob: float | None = None


class Logprob(BareLogprob):
    """A whole entry, for a harness that asked for logprobs or a trainer that wants the alternatives."""

    rank: int | None = None
    top_logprobs: msgspec.Raw = msgspec.Raw(b"[]")


_logprob: Callable[[BareLogprob], float | None] = attrgetter("logprob")
_token_id: Callable[[BareLogprob], int] = attrgetter("token_id")


class _Top(msgspec.Struct):
    token_id: int
    logprob: float | None = None


class Logprobs(msgspec.Struct):
    content: list[Logprob] | None = None


class Version(msgspec.Struct):
    version: str | int | None
    start: int
    end: int


class ChoicePiece(msgspec.Struct):
    """What an answer or an event says of one choice."""

    index: int
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    token_ids: list[int] | None = None
    logprobs: Logprobs | None = None
    weight_versions: list[Version] | None = None
    routed_experts: str | None = None


@dataclass(frozen=True, slots=True)
class Parsed:
    """What the sampled ids say: a chat message without minted ids, and chat-shaped logprobs where they were asked for."""

    message: dict[str, Any]
    logprobs: Sequence[Mapping[str, Any]] | None = None


class _CachedTokens(msgspec.Struct):
    cached_tokens: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens_details: _CachedTokens | None = None

    def take(self, said: Usage | None) -> None:
        """What an answer or the last event of a stream said."""
        if said is not None and said.prompt_tokens_details is not None:
            self.prompt_tokens_details = said.prompt_tokens_details

    @property
    def cached_tokens(self) -> int:
        """0 where the engine does not say."""
        return (self.prompt_tokens_details.cached_tokens or 0) if self.prompt_tokens_details else 0


class Generated(Told):
    """A whole answer or an event of a stream."""

    choices: list[ChoicePiece] = msgspec.field(default_factory=list)
    usage: Usage | None = None
    prompt_logprobs: PromptLogprobs | None = None


class _BareLogprobs(msgspec.Struct):
    content: list[BareLogprob] | None = None


class _BarePiece(ChoicePiece):
    logprobs: _BareLogprobs | None = None  # type: ignore[assignment]


class _BarelyGenerated(Generated):
    choices: list[_BarePiece] = msgspec.field(default_factory=list)  # type: ignore[assignment]


def answer_type(job: Job) -> type[Generated]:
    """What an answer is decoded as: the alternatives of each token only where somebody looks at them."""
    return Generated if job.wanted.top_logprobs or job.request.top_logprobs is not None else _BarelyGenerated


class SampledChoice:
    """`live` tells its text on the way."""

    def __init__(self, index: int, live: bool) -> None:
        self.index = index
        self.heard = False
        self.token_ids: list[int] = []
        self.entries: list[Logprob] = []
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None
        self._versions: list[Version] = []
        self._routed_experts: str | None = None
        self.live = LiveText(index) if live else None

    def add(self, piece: ChoicePiece) -> None:
        new = piece.token_ids or []
        self.token_ids.extend(new)
        if piece.logprobs and piece.logprobs.content:
            self.entries.extend(piece.logprobs.content)
        self.finish_reason = piece.finish_reason or self.finish_reason
        self.stop_reason = piece.stop_reason if piece.stop_reason is not None else self.stop_reason
        self._versions.extend(piece.weight_versions or ())
        self._routed_experts = piece.routed_experts or self._routed_experts
        if self.live is not None:
            self.live.take(spoken(new, self.finish_reason, self.stop_reason))

    @property
    def spoken(self) -> list[int]:
        """The ids to be derendered, which would spell the stop token out."""
        return spoken(self.token_ids, self.finish_reason, self.stop_reason)

    def shown(self, job: Job) -> list[Logprob]:
        """The entries as a harness sees them, which may have asked for fewer alternatives than the engine was asked for."""
        if not job.wanted.top_logprobs:
            return self.entries
        most = max(job.request.top_logprobs or 0, 1)
        return [
            msgspec.structs.replace(entry, top_logprobs=msgspec.Raw(msgspec.json.encode(_tops(entry)[:most])))
            for entry in self.entries
        ]

    def sampled(self, replica: Replica, job: Job, parsed: Parsed, prompt_logprobs: PromptLogprobs | None) -> Sampled:
        """Raises EngineFailed when the logprobs are of other tokens."""
        assert job.prompt_ids is not None
        check_entries(self.index, self.token_ids, list(map(_token_id, self.entries)))
        tops = None
        if job.wanted.top_logprobs:
            told = (msgspec.json.decode(entry.top_logprobs, type=list[_Top]) for entry in self.entries)
            tops = [[(top.token_id, top.logprob) for top in entry if top.logprob is not None] for entry in told]
        return Sampled(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=list(map(_logprob, self.entries)),
            spans=spans_of(replica, self._versions),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            message=parsed.message,
            logprob_content=parsed.logprobs,
            details=details_of(
                job.wanted,
                job.prompt_ids,
                len(self.token_ids),
                tops=tops,
                prompt_logprobs=prompt_logprobs,
                routed_experts=self._routed_experts,
            ),
        )


def _tops(entry: Logprob) -> list[msgspec.Raw]:
    return msgspec.json.decode(entry.top_logprobs, type=list[msgspec.Raw])


def gather(choices: Sequence[SampledChoice], pieces: Sequence[ChoicePiece]) -> list[SampledChoice]:
    """The choices that got something."""
    for piece in pieces:
        at(choices, piece.index).add(piece)
    return [choices[piece.index] for piece in pieces]


# vLLM's generate endpoint: what it is asked for, and what its answers say beside the tokens (usage, the weights behind them).


GENERATE = "/inference/v1/generate"


def generate_body(replica: Replica, job: Job, stream: bool) -> dict[str, Any]:
    """The rendering's generate body with the job's ids, under the sampling in effect; logprobs always, and what is wanted beside
    them."""
    assert job.body is not None and job.prompt_ids is not None
    sampling = {**job.body.get("sampling_params", {}), **job.sampling, **job.wanted.parameters}
    sampling["logprobs"] = job.wanted.logprobs(job.request.top_logprobs)
    if job.request.n > 1:
        sampling["n"] = job.request.n
    return {
        **job.body,
        "token_ids": job.prompt_json,
        "sampling_params": sampling,
        "request_id": job.call_id,
        "model": replica.model_for(job.request.model),
        "stream": stream,
        # A stream tells of cached tokens in its last event, and only when asked to.
        "stream_options": {"include_usage": True} if stream else None,
        "return_token_ids": False,
    }


def streamed(job: Job, stream: bool) -> bool:
    """Whether the engine is asked to stream: only whole answers tell the logprobs of the prompt."""
    return stream and not job.wanted.prompt_logprobs


def spans_of(replica: Replica, versions: Sequence[Version]) -> tuple[Span, ...]:
    """Spans with integer versions; none at all when one of them is unknown: an unversioned token is never trained."""
    spans = []
    for item in versions:
        version = replica.version_of(None if item.version is None else str(item.version))
        if version is None:
            return ()
        spans.append(Span(version, item.start, item.end))
    return tuple(spans)


# Text while it is sampled, on the token path: the engine's own streaming parsers, asked in steps.
#
# vLLM's derender endpoint parses a stream statelessly: each step sends the state back and replays what came before, so a step costs
# as much as the reply is long. Steps are therefore as frequent as they are cheap: the first at once, later ones when the pause since
# the last is at least `_PATIENCE` times what that one took.
#
# The reply is in the end what the engine makes of the whole. vLLM's streaming parsers do not always agree with that: white space
# before a tool call goes, arguments are written anew, and a call that the limit cuts turns the calls before it into text. So what is
# told on the way is reasoning and text up to the first sign of a tool call, outer white space held back; `rest` tells what is left.


DERENDER = "/v1/chat/completions/derender"

_PATIENCE = 8.0
_SHORTEST_PAUSE_SECONDS = 0.03


class _Choice(msgspec.Struct):
    delta: dict[str, Any] = {}


class _Chunk(msgspec.Struct):
    choices: list[_Choice] = []


class _Step(msgspec.Struct):
    chunk: _Chunk
    stream_state: msgspec.Raw


class LiveText:
    """One choice's reply, told as its ids come in."""

    def __init__(self, index: int) -> None:
        self._assembly = Assembly(index)
        self._index = index
        self._content = ""
        self._reasoning = ""
        self._pending: list[int] = []
        self._state: msgspec.Raw | None = None
        self._next_at = 0.0

    def take(self, token_ids: Sequence[int]) -> None:
        self._pending.extend(token_ids)

    @property
    def due(self) -> bool:
        return bool(self._pending) and time.perf_counter() >= self._next_at

    async def step(
        self, http: EngineHttp, replica: Replica, prompt_ids: msgspec.Raw, chat_request: dict[str, Any]
    ) -> Delta | None:
        """What the pending ids make certain, None when nothing. Raises VerbatimError when the engine cannot parse its own reply."""
        await self._parse(http, replica, prompt_ids, chat_request, None)
        return self._told(self._certain())

    async def finish(
        self, http: EngineHttp, replica: Replica, prompt_ids: msgspec.Raw, chat_request: dict[str, Any], finish_reason: str
    ) -> dict[str, Any]:
        """The whole message as the streaming parsers have it; nothing of it is told by that. Raises as `step`."""
        await self._parse(http, replica, prompt_ids, chat_request, finish_reason)
        return self._assembly.message()

    async def _parse(
        self,
        http: EngineHttp,
        replica: Replica,
        prompt_ids: msgspec.Raw,
        chat_request: dict[str, Any],
        finish_reason: str | None,
    ) -> None:
        """Let the parsers take in the pending ids. With a `finish_reason` they give out all they hold."""
        started = time.perf_counter()
        choice = {"index": 0, "token_ids": self._pending, "finish_reason": finish_reason}
        body = {
            "stream": True,
            "model": chat_request["model"],
            "generate_chunk": {"choices": [choice]},
            "stream_state": self._state,
            "prompt_token_ids": prompt_ids,
            "chat_request": chat_request,
        }
        step = await http.ask(replica, DERENDER, body, _Step)
        self._state, self._pending = step.stream_state, []
        now = time.perf_counter()
        self._next_at = now + max(_SHORTEST_PAUSE_SECONDS, _PATIENCE * (now - started))
        self._assembly.add(step.chunk.choices[0].delta if step.chunk.choices else {})

    def extends_to(self, message: Mapping[str, Any]) -> bool:
        """Whether what was told is the beginning of `message`."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        return content.startswith(self._content) and reasoning.startswith(self._reasoning)

    def rest(self, message: Mapping[str, Any]) -> Delta | None:
        """What of the whole `message`, which must begin with what was told, was not told yet; None when nothing."""
        assert self.extends_to(message), "told text cannot be taken back"
        delta = self._told(message) or Delta(self._index)
        delta.tool_calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
        return delta if delta.content or delta.reasoning or delta.tool_calls else None

    def _certain(self) -> dict[str, Any]:
        told = self._assembly.message()
        if told.get("tool_calls"):
            return {"content": self._content, "reasoning_content": self._reasoning}
        return {"content": (told.get("content") or "").rstrip(), "reasoning_content": told.get("reasoning_content") or ""}

    def _told(self, message: Mapping[str, Any]) -> Delta | None:
        """The text of `message` beyond what was told, which from now on is told."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        delta = Delta(self._index, content[len(self._content) :], reasoning[len(self._reasoning) :])
        self._content, self._reasoning = content, reasoning
        return delta if delta.content or delta.reasoning else None


# Parser: what the ids of a reply say, by the engine's own tool and reasoning parsers (vLLM's derender endpoint).


class _Derendered(msgspec.Struct):
    choices: list[dict[str, Any]]


class Parser:
    """The parsers of one job's engine, under what they need of its request: tools, choice and flags, but not the history."""

    def __init__(self, http: EngineHttp, replica: Replica, job: Job) -> None:
        self._http = http
        self._replica = replica
        self._job = job
        self._request = chat_body(job.request, {})
        self._request.pop("n", None)
        self._request["messages"] = job.request.messages[-1:]

    async def told(self, choice: SampledChoice) -> Parsed:
        """What the choice says in the end: what it was told to say on the way, and else what its ids are parsed to as a whole.

        Raises VerbatimError when the engine cannot parse its own reply.
        """
        parsed = await self._whole(choice)
        if choice.live is None or choice.live.extends_to(parsed.message):
            return parsed
        # The harness has read it already: then all of the reply is what those parsers make of it that told its beginning.
        finish_reason, prompt_ids = choice.finish_reason or "abort", self._job.prompt_json
        message = await choice.live.finish(self._http, self._replica, prompt_ids, self._request, finish_reason)
        keep_one_call(message, self._job.request)
        return Parsed(message, parsed.logprobs)

    async def step(self, live: LiveText) -> Delta | None:
        """See LiveText.step."""
        return await live.step(self._http, self._replica, self._job.prompt_json, self._request)

    async def _whole(self, choice: SampledChoice) -> Parsed:
        wanted = self._job.request.top_logprobs is not None
        spoken = choice.spoken
        if not choice.token_ids or not (spoken or wanted):
            return Parsed({"role": "assistant", "content": ""})
        body = {
            "model": self._job.request.model,
            "generate_response": self._generate_response(choice, spoken or choice.token_ids, wanted),
            "chat_request": self._request,
        }
        derendered = (await self._http.ask(self._replica, DERENDER, body, _Derendered)).choices[0]
        content = (derendered.get("logprobs") or {}).get("content") if wanted else None
        message = self._cut(derendered.get("message") or {}, choice) if spoken else {"role": "assistant", "content": ""}
        return Parsed(message, content)

    def _cut(self, derendered: Mapping[str, Any], choice: SampledChoice) -> dict[str, Any]:
        """The message as vLLM's chat endpoint would show it; derender shows all that was sampled."""
        message = plain_message(derendered)
        if isinstance(choice.stop_reason, str):
            kept = bool(self._job.request.forward.get("include_stop_str_in_output"))
            cut_at_stop(message, choice.stop_reason, kept=kept)
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
            shaped["logprobs"] = {"content": choice.shown(self._job)}
        return {"request_id": self._job.call_id, "choices": [shaped], "prompt_token_ids": self._job.prompt_json}


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


def keep_one_call(message: dict[str, Any], request: Request) -> None:
    """Drop the tool calls after the first where the harness wants no parallel ones."""
    if request.forward.get("parallel_tool_calls") is False and message.get("tool_calls"):
        message["tool_calls"] = message["tool_calls"][:1]


def cut_at_stop(message: dict[str, Any], stop: str, *, kept: bool = False) -> None:
    """Drop the stop string, unless it is to be `kept`, and what follows from the text that holds it: the ids keep all of it, the
    harness's text does not."""
    for field in ("content", "reasoning_content"):
        text = message.get(field)
        if text and stop in text:
            message[field] = text[: text.rindex(stop) + (len(stop) if kept else 0)]
            return


# Tool calls that an engine's parser could not read: the model meant to call a tool, and the harness got none, or one it cannot run.
#
# A parser that cannot read a call leaves it in the text, or hands on arguments that are no JSON object. Either is noted with the call, so
# that a trainer can filter or punish it. It is a label: what is trained does not depend on it.


_OPENERS = (
    *("<tool_call>", "<tool_calls>", "<function=", "<function_calls>", "<minimax:tool_call>", "<|tool_call|>", "<|tool_call>"),
    *("[TOOL_CALLS]", "<|python_tag|>", "<|action_start|>", "functools["),
    *("<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>"),  # noqa: RUF001
)
"""How the formats that vLLM 0.32 and SGLang have parsers for begin a call (vllm/tool_parsers)."""


def has_unread_call(request: Request, message: Mapping[str, Any], finish_reason: str) -> bool:
    """Whether the reply has a call that could not be read. A reply that was cut has none: it was not whole."""
    if not request.tools or request.forward.get("tool_choice") == "none" or finish_reason not in ("stop", "tool_calls"):
        return False
    calls = message.get("tool_calls") or ()
    if any(UNPARSED in arguments_object(call["function"]["arguments"]) for call in calls):
        return True
    content = message.get("content")
    return isinstance(content, str) and any(opener in content for opener in _OPENERS)
