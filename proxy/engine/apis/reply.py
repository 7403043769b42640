"""A reply as an engine samples it: choices put together from an answer or its pieces, their messages, and the details beside them."""

from __future__ import annotations

import base64
import io
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Protocol, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from proxy.dialects.base import Delta, Request
from proxy.engine.replica import Replica
from proxy.errors import EngineFailed, VerbatimError
from reconstruct.details import NO_TOKEN, CallDetails, Experts
from reconstruct.prompt import Prompt
from reconstruct.records import Ids, Logprobs
from reconstruct.spans import Span

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(slots=True)
class EngineChoice:
    """One choice as the engine emitted it: one logprob per token id, `spans` empty if versions are unknown, `token_ids` None if the
    engine returned none. `message` is a chat message whose tool-call ids are the engine's, `text` what it was read from, with its markup;
    None where the engine does not tell. `details` cover the whole prompt and these tokens."""

    index: int
    token_ids: list[int] | None
    logprobs: list[float | None]
    spans: tuple[Span, ...]
    finish_reason: str
    stop_reason: str | int | None
    message: dict[str, Any]
    logprob_content: Sequence[Mapping[str, Any]] | None = None
    details: CallDetails | None = None
    text: str | None = None
    base_spans: tuple[Span, ...] = ()
    """Of an adapter's tokens: the versions of the base model under it."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """The prompt that an engine planned, and a generate body with its own sampling."""

    prompt: Prompt
    body: Mapping[str, Any]


@dataclass(slots=True)
class EngineReply:
    """All choices of a call. `prompt_ids` are the engine's own if it rendered the messages. `broken` says why the reply was cut when
    neither the model nor the harness ended it. `completion_tokens` is the engine's own count over all choices, of which only a reply
    without ids needs one; 0 if it does not say. `plan` is the prompt of an engine that planned it. `adjusted` are the parameters of the
    job's `sampling` that were other in the end."""

    choices: list[EngineChoice]
    prompt_ids: Ids | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    broken: str | None = None
    completion_tokens: int = 0
    plan: EnginePlan | None = None
    adjusted: Mapping[str, Any] = field(default_factory=dict)

    @property
    def returns_ids(self) -> bool | None:
        """Whether the engine gave the ids of what it sampled, with a logprob each. None where it sampled nothing, or broke off."""
        sampled = [choice for choice in self.choices if choice.token_ids is None or choice.token_ids]
        if self.broken is not None or not sampled:
            return None
        return all(choice.token_ids is not None and len(choice.logprobs) == len(choice.token_ids) for choice in sampled)


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


class PartialChoice(Protocol):
    index: int
    """Which of the reply's choices it is, from 0."""
    heard: bool
    """Whether the engine has sent anything for it."""

    @property
    def has_content(self) -> bool:
        """Whether something was sampled that must be recorded even if the reply breaks off."""
        ...


C = TypeVar("C", bound=PartialChoice)


@dataclass(slots=True, eq=False)
class PartialReply:
    """`with PartialReply(choices) as reading:` around receiving a reply: if it breaks off after something was sampled, the error becomes
    `reading.broken`; if it ends without one of the choices, raises EngineFailed."""

    _choices: Sequence[PartialChoice]
    broken: str | None = None

    def __enter__(self) -> PartialReply:
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
        self.sampled_text: str | None = None
        """What was sampled as text, where the engine tells it beside the message."""

    @property
    def has_content(self) -> bool:
        return bool(self.token_ids)

    def finish(
        self,
        replica: Replica,
        wanted: WantedDetails,
        prompt_ids: Ids,
        logprobs: list[float | None],
        message: dict[str, Any],
        content: Sequence[Mapping[str, Any]] | None,
        prompt_logprobs: PromptLogprobs | Logprobs | None,
        tops: Tops | None = None,
    ) -> EngineChoice:
        """`content`: chat-shaped logprobs for the harness."""
        return EngineChoice(
            index=self.index,
            token_ids=self.token_ids,
            logprobs=logprobs,
            spans=self._spans(replica),
            finish_reason=self.finish_reason or "abort",
            stop_reason=self.stop_reason,
            message=message,
            logprob_content=content,
            text=self.sampled_text,
            details=read_details(
                wanted,
                prompt_ids,
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
            version = replica.host.version_of(None if item.version is None else str(item.version))
            if version is None:
                return ()
            spans.append(Span(version, item.start, item.end))
        return tuple(spans)


_END_OF_IDS = 2**31
"""Records hold ids as int32. No engine reports the size of its vocabulary: the embedding may exceed the tokenizer."""

NO_LOGPROBS = ("raw_logits", "processed_logits")
"""vLLM's `--logprobs-mode` of an engine that reports logits instead of logprobs."""

_ROUNDING = 1e-4
"""How far above 0 the logprob of a certain token may be, if an engine normalises in less than double precision."""


def check_sampled(outcome: EngineReply, engine_mode: str) -> None:
    """Raises EngineFailed for ids outside int32 and probabilities above 1. `engine_mode`: vLLM's `--logprobs-mode`.

    Lengths are not checked: records whose lengths differ are kept and never trained."""
    if outcome.prompt_ids is not None and len(outcome.prompt_ids) and int(outcome.prompt_ids.min()) < 0:
        raise EngineFailed(f"the engine's prompt has the id {int(outcome.prompt_ids.min())}, which no token has")
    for sampled in outcome.choices:
        if not sampled.token_ids:
            continue
        for token in (min(sampled.token_ids), max(sampled.token_ids)):
            if not 0 <= token < _END_OF_IDS:
                raise EngineFailed(f"choice {sampled.index} of the engine's answer has the id {token}, which no token has")
        most = _find_largest(sampled.logprobs)
        if most > _ROUNDING and engine_mode not in NO_LOGPROBS:
            raise EngineFailed(f"choice {sampled.index} of the engine's answer has the logprob {most:g}, which no token has")


def _find_largest(logprobs: Sequence[Any]) -> float:
    """0 where there is none."""
    try:
        return max(logprobs, default=0.0) or 0.0
    except TypeError:
        # An engine may leave one out.
        return max([logprob for logprob in logprobs if logprob is not None], default=0.0)


def check_entries(index: int, token_ids: Sequence[int], named: Sequence[int]) -> None:
    """Raises EngineFailed if logprobs name other tokens than were sampled. With another length they are never trained."""
    if len(named) == len(token_ids) and list(named) != list(token_ids):
        token, other = next(pair for pair in zip(token_ids, named, strict=True) if pair[0] != pair[1])
        raise EngineFailed(f"choice {index} of the engine's answer has the logprob of token {other} where {token} was sampled")


AS_ID = "token_id:"
"""Before the id of a token that is named instead of written."""


def read_named_id(token: str) -> int:
    """The id in "token_id:123". Raises EngineFailed for another text."""
    digits = token.removeprefix(AS_ID)
    if digits == token or not (digits.isascii() and digits.isdecimal()):
        raise EngineFailed(f"the engine's answer has a logprob of {token[:80]!r}, which does not say of which token id")
    return int(digits)


def is_visible(request: Request, delta: Delta) -> bool:
    """Whether the harness sees anything of the delta."""
    if delta.content or delta.reasoning or delta.tool_calls:
        return True
    return bool((request.top_logprobs is not None and delta.logprobs) or (request.wants_ids and delta.token_ids))


# The assistant message of a choice.


class Assembly:
    """The message of one choice so far, from an engine's whole message or the deltas of its stream. A piece costs what it brings,
    however long the message is.

    `message()` has the fields harnesses know; tool-call ids are still the engine's."""

    def __init__(self, index: int) -> None:
        self.index = index
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: dict[int, _CallSoFar] = {}

    def add(self, piece: Mapping[str, Any]) -> Delta:
        """Append a message or delta; returns it as the harness sees it."""
        content = piece.get("content") or ""
        self._content.append(content)
        if len(piece) == 1 and content:
            return Delta(self.index, content)
        reasoning = piece.get("reasoning_content") or piece.get("reasoning") or ""
        calls = [self._add_call(call) for call in piece.get("tool_calls") or ()]
        self._reasoning.append(reasoning)
        return Delta(self.index, content, reasoning, calls)

    def message(self) -> dict[str, Any]:
        calls = [self._calls[position].whole() for position in sorted(self._calls)]
        content = "".join(self._content)
        message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
        if reasoning := "".join(self._reasoning):
            message["reasoning_content"] = reasoning
        if calls:
            message["tool_calls"] = calls
        return message

    def __bool__(self) -> bool:
        """Whether any piece came, even an empty one: the engine has begun to reply."""
        return bool(self._content)

    def _add_call(self, call: Mapping[str, Any]) -> Mapping[str, Any]:
        """Append a piece of a tool call; returns it with its position. A server may leave that out: then a piece that names a function
        begins the next call, and any other goes on with the last."""
        position = call.get("index")
        if position is None:
            last = max(self._calls, default=-1)
            position = last + 1 if last < 0 or names_function(call) else last
            call = {**call, "index": position}
        known = self._calls.setdefault(position, _CallSoFar())
        function = call.get("function") or {}
        known.id = known.id or call.get("id") or ""
        known.name += function.get("name") or ""
        known.arguments.append(function.get("arguments") or "")
        return call


class _CallSoFar:
    """A tool call of which pieces came."""

    __slots__ = ("arguments", "id", "name")

    def __init__(self) -> None:
        self.id = self.name = ""
        self.arguments: list[str] = []

    def whole(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": "".join(self.arguments)}}


def names_function(piece: Mapping[str, Any]) -> bool:
    """Whether a piece of a tool call says what is called, as the first does."""
    return bool((piece.get("function") or {}).get("name"))


class CertainText(Assembly):
    """One choice's text while it is sampled, as far as it is certain.

    The final message is the engine's parse of the whole reply, which the streaming parsers do not always agree with: they drop white
    space before a tool call, rewrite arguments, and turn earlier calls into text if the limit cuts one. So only reasoning and text before
    the first sign of a tool call go out early, without trailing white space; `take_rest` gives what is left."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self._sent: list[str] = []
        self._sent_reasoning: list[str] = []
        self._certain: list[str] = []
        self._thoughts: list[str] = []
        """Text and reasoning that were not sent."""
        self._space: list[str] = []
        """White space after the text that is certain."""

    def add_delta(self, delta: Mapping[str, Any]) -> None:
        """Add what the streaming parsers say."""
        content = delta.get("content")
        if content and len(delta) == 1:
            # What nearly every token is.
            self._content.append(content)
        else:
            added = self.add(delta)
            content = added.content
            if added.reasoning:
                self._thoughts.append(added.reasoning)
        if content:
            text = content.rstrip()
            if text:
                self._certain += [*self._space, text]
                self._space.clear()
            self._space.append(content[len(text) :])

    def is_prefix_of(self, message: Mapping[str, Any]) -> bool:
        """Whether `message` begins with what was sent."""
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        return content.startswith("".join(self._sent)) and reasoning.startswith("".join(self._sent_reasoning))

    def agrees_with(self, message: Mapping[str, Any]) -> bool:
        """Whether `message` begins with all that is certain, sent or not."""
        said = self.message()
        if said.get("tool_calls"):
            return self.is_prefix_of(message)
        text, thinking = (said["content"] or "").rstrip(), said.get("reasoning_content") or ""
        return (message.get("content") or "").startswith(text) and (message.get("reasoning_content") or "").startswith(thinking)

    @property
    def has_sent(self) -> bool:
        return bool(self._sent)

    def take_certain(self) -> Delta | None:
        """The text that is certain and was not sent; None if there is none."""
        if self._calls or not (self._certain or self._thoughts):
            return None
        delta = Delta(self.index, "".join(self._certain), "".join(self._thoughts))
        self._certain.clear()
        self._thoughts.clear()
        self._sent.append(delta.content)
        self._sent_reasoning.append(delta.reasoning)
        return delta

    def take_rest(self, message: Mapping[str, Any]) -> Delta | None:
        """What of the whole `message`, which must begin with what was sent, was not sent; None if nothing."""
        assert self.is_prefix_of(message), "text that was sent cannot be taken back"
        content, reasoning = message.get("content") or "", message.get("reasoning_content") or ""
        calls = [{"index": position, **call} for position, call in enumerate(message.get("tool_calls") or ())]
        delta = Delta(self.index, content[sum(map(len, self._sent)) :], reasoning[sum(map(len, self._sent_reasoning)) :], calls)
        return delta if delta.content or delta.reasoning or delta.tool_calls else None


def shows_text(message: Mapping[str, Any]) -> bool:
    """Whether the message has text or reasoning, not only tool calls."""
    return bool(message.get("content") or message.get("reasoning_content"))


def plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """An engine's assistant message reduced to the fields harnesses know: content, reasoning_content, tool_calls."""
    plain: dict[str, Any] = {"role": "assistant", "content": message.get("content")}
    if reasoning := message.get("reasoning_content") or message.get("reasoning"):
        plain["reasoning_content"] = reasoning
    calls = message.get("tool_calls")
    if calls:
        plain["tool_calls"] = [_plain_call(call) for call in calls]
    if plain["content"] is None and not calls:
        plain["content"] = ""
    return plain


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    named = {"name": function.get("name") or "", "arguments": function.get("arguments") or ""}
    return {"id": call.get("id") or "", "type": "function", "function": named}


def visible_ids(token_ids: list[int], finish_reason: str | None, stop_reason: str | int | None) -> list[int]:
    """The ids that show in the text: all but the stop token that ended it. The ids of a stop string are text."""
    return token_ids[:-1] if finish_reason == "stop" and not isinstance(stop_reason, str) else token_ids


def cut_at_stop(message: dict[str, Any], stop: str, *, keep: bool = False) -> None:
    """Remove the stop string and what follows it from the text that holds it; `keep` leaves the stop string itself.

    Only the harness's text is cut: the recorded ids keep all of it."""
    for name in ("content", "reasoning_content"):
        text = message.get(name)
        if text and stop in text:
            message[name] = text[: text.rindex(stop) + (len(stop) if keep else 0)]
            return


def keep_one_call(message: dict[str, Any], request: Request) -> None:
    """Drop all tool calls but the first when the harness forbids parallel ones."""
    if request.forward.get("parallel_tool_calls") is False and message.get("tool_calls"):
        message["tool_calls"] = message["tool_calls"][:1]


# Details beside the sampled tokens and their logprobs: alternatives, prompt logprobs and routed experts, requested and read.
#
# vLLM 0.32: `logprobs: k` returns k entries, the sampled token first and then the most probable others, so one more than wanted is
# requested. `prompt_logprobs: 0` scores the prompt's own tokens; only whole replies carry it, and vLLM dies when the prompt is read from
# the prefix cache, hence `skip_reading_prefix_cache`. With `--enable-return-routed-experts` every reply ends with the experts of each
# position as a base64 `.npy`; `routed_experts_prompt_start` skips the known positions.


_MAX_EXPERTS = 2**15
"""Rows store experts as int16."""

Tops = Sequence[Sequence[tuple[int, float]]]
"""For each sampled token, its most probable alternatives as (id, logprob), in any order."""


@dataclass(frozen=True, slots=True)
class WantedDetails:
    """`top_logprobs`: how many alternatives per token; `routed_from`: the first position whose experts are unknown."""

    top_logprobs: int = 0
    prompt_logprobs: bool = False
    routed_experts: bool = False
    routed_from: int = 0

    def logprobs(self, shown: int | None) -> int:
        """The `logprobs` to request when the harness wants to see `shown` of them."""
        return max(shown or 0, self.top_logprobs + 1 if self.top_logprobs else 0)

    @property
    def parameters(self) -> dict[str, Any]:
        """vLLM's sampling parameters for prompt logprobs and routed experts."""
        parameters: dict[str, Any] = {}
        if self.prompt_logprobs:
            parameters |= {"prompt_logprobs": 0, "skip_reading_prefix_cache": True}
        if self.routed_experts and self.routed_from:
            parameters["routed_experts_prompt_start"] = self.routed_from
        return parameters


class PromptLogprob(msgspec.Struct):
    logprob: float | None = None


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""For each prompt token, logprobs by id; None for the first."""


class _Unfit(Exception):
    """A detail that does not belong to these tokens."""


def read_details(
    wanted: WantedDetails,
    prompt_ids: Sequence[int] | NDArray[np.int32],
    sampled: int,
    *,
    tops: Tops | None = None,
    prompt_logprobs: PromptLogprobs | Logprobs | None = None,
    routed_experts: str | bytes | None = None,
) -> CallDetails | None:
    """The wanted details the engine returned, for the whole prompt and `sampled` tokens. Details of other lengths are logged and
    left out. `prompt_logprobs` as an array are of the prompt's own tokens; `routed_experts` as bytes are not in base64."""
    top = prompt = experts = None
    if wanted.top_logprobs and tops is not None:
        top = _read_or_log(lambda: _read_tops(tops, wanted.top_logprobs, sampled))
    if wanted.prompt_logprobs and prompt_logprobs is not None:
        prompt = _read_or_log(lambda: _read_prompt_logprobs(prompt_ids, prompt_logprobs))
    if wanted.routed_experts and routed_experts is not None:
        # The last sampled token was not fed back, so it has no experts.
        positions = len(prompt_ids) + sampled - 1 - wanted.routed_from
        experts = _read_or_log(lambda: _read_experts(routed_experts, positions))
    if top is None and prompt is None and experts is None:
        return None
    top_ids, top_logprobs = top or (None, None)
    return CallDetails(top_ids, top_logprobs, prompt, experts, wanted.routed_from if experts is not None else 0)


def _read_or_log(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except _Unfit as error:
        log.warning("a detail of an engine's reply is left out: %s", error)
        return None


def _read_tops(tops: Tops, most: int, sampled: int) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    if len(tops) != sampled:
        raise _Unfit(f"alternatives of {len(tops)} positions for {sampled} sampled tokens")
    ids = np.full((sampled, most), NO_TOKEN, dtype=np.int32)
    logprobs = np.full((sampled, most), np.nan, dtype=np.float32)
    for position, alternatives in enumerate(tops):
        best = sorted(dict(alternatives).items(), key=lambda entry: -entry[1])[:most]
        if best:
            ids[position, : len(best)], logprobs[position, : len(best)] = zip(*best, strict=True)
    return ids, logprobs


def _read_prompt_logprobs(prompt_ids: Sequence[int] | NDArray[np.int32], entries: PromptLogprobs | Logprobs) -> Logprobs:
    if len(entries) != len(prompt_ids):
        raise _Unfit(f"logprobs of {len(entries)} tokens for a prompt of {len(prompt_ids)}")
    if isinstance(entries, np.ndarray):
        return entries
    found = [(entry or {}).get(str(token)) for entry, token in zip(entries, prompt_ids, strict=True)]
    values = [float("nan") if one is None or one.logprob is None else one.logprob for one in found]
    return np.array(values, dtype=np.float32)


def _read_experts(told: str | bytes, positions: int) -> Experts:
    try:
        content = base64.b64decode(told) if isinstance(told, str) else told
        experts: NDArray[Any] = np.load(io.BytesIO(content), allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise _Unfit(f"unreadable routed experts ({error})") from error
    if experts.ndim != 3 or len(experts) != positions or experts.dtype.kind not in "iu":
        raise _Unfit(f"routed experts of shape {experts.shape} for {positions} positions")
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < _MAX_EXPERTS:
        raise _Unfit(f"routed experts from {int(experts.min())} to {int(experts.max())}")
    return experts.astype(np.uint8) if not experts.size or int(experts.max()) < 256 else experts.astype(np.uint16)
