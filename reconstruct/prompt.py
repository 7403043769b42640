"""The prompt of a call: its parent's ids and a proven bridge, or a fresh rendering with the reason.

`plan` and the functions that prove a bridge are generators: they yield the renderings they need and are sent their ids. The service drives
it over vLLM's `/render`, and Verbatim's plugin inside vLLM with the engine's own renderer.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconstruct.media import Ranges, carry_ranges, collapse, count_media
from reconstruct.messages import Message, reasoning_of
from reconstruct.records import Ids, shared_length

IDS_UNKNOWN = "ids_unknown"
"""Why a call does not extend its parent: the engine did not tell the ids of one of the two."""

MEDIA_UNPLACED = "media_unplaced"
"""Why a call with images does not extend its parent: its images cannot be told apart from a placeholder that was sampled, or the template
shows others than the messages have."""


@dataclass(frozen=True, slots=True)
class Rendering:
    """A requested rendering: these messages with the call's tools and template kwargs."""

    messages: Sequence[Message]
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The call that a request continues. `history` are the first messages of the request as the parent's lineage recorded them, the
    parent's reply last; `tail` are the others, with calls named as the lineage names them. `ids` are the parent's prompt and completion,
    the last `sampled` of them its completion; None: not known. `closed`: the model ended the turn itself. `asked` is what the template
    made of the parent's request, if known. `media` are the ranges of its images in `ids`.

    `redressed`: the parent's rendering depended on other things than messages (see reconstruct.messages.dress), so that a rendering is
    to prove that it makes no difference."""

    history: Sequence[Message]
    tail: Sequence[Message]
    ids: Ids | None
    sampled: int
    closed: bool
    asked: Ids | None = None
    redressed: bool = False
    media: Ranges = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The ids to sample after, and why they are a fresh rendering (None: they extend the parent, or there is none).

    `rendering` is what the template makes of the whole request, `close` its turn end, once known. `continues`: the request still
    continues its parent, which is False if that was rendered otherwise. `media` are the ranges of its images in `ids`."""

    ids: Ids
    branch_reason: str | None
    rendering: Ids
    close: Ids | None
    continues: bool
    media: Ranges = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Renderings to answer with their ids. If not `required`, one that the template rejects is answered with no ids: the messages are
    made up for a proof."""

    renderings: tuple[Rendering, ...]
    required: bool


Steps = Generator[Step, Sequence[Ids], tuple[Prompt, Rendering]]


def _no_media(_: Rendering) -> Ranges:
    return ()


def plan(
    messages: Sequence[Message],
    parent: Parent | None,
    close: Ids | None,
    *,
    retain_thinking: bool,
    media_of: Callable[[Rendering], Ranges] = _no_media,
) -> Steps:
    """The prompt of `messages`, and which of the renderings was that of the whole request. `close` is the template's turn end, if known
    from an earlier call. `media_of` has the ranges of a rendering that was answered."""
    continues = parent is not None and (yield from _renders_alike(parent))
    if parent is None or not continues or not parent.tail:
        return (yield from _render_afresh(messages, None, close, continues, media_of))
    if parent.ids is None:
        return (yield from _render_afresh(messages, IDS_UNKNOWN, close, continues, media_of))
    if close is None:
        close = yield from _find_turn_end()
        if close is None:
            return (yield from _render_afresh(messages, "turn_end_unknown", None, continues, media_of))
    *history, said = parent.history
    reply = Reply(said, parent.ids[len(parent.ids) - parent.sampled :], parent.closed)
    steps = derive(history, reply, parent.tail, close, retain_thinking=retain_thinking, asked=parent.asked)
    wanted = next(steps)
    whole, rendered = wanted[1], (yield Step(wanted, required=True))
    rendering = rendered[1]
    while True:
        try:
            wanted = steps.send(rendered)
        except StopIteration as stop:
            outcome: Bridge | Refusal = stop.value
            break
        rendered = yield Step(wanted, required=False)
    if isinstance(outcome, Refusal):
        return (yield from _render_afresh(messages, outcome.reason, close, continues, media_of))
    ids, media = np.concatenate((parent.ids, outcome.ids)), media_of(whole)
    if media or parent.media:
        held = count_media(parent.history), count_media(parent.tail)
        carried = carry_ranges(parent.ids, parent.media, ids, rendering, media, *held)
        if carried is None or collapse(ids, carried) is None:
            return (yield from _render_afresh(messages, MEDIA_UNPLACED, close, continues, media_of))
        media = carried
    return Prompt(ids, None, rendering, close, continues, media), whole


def _renders_alike(parent: Parent) -> Generator[Step, Sequence[Ids], bool]:
    """Whether the parent's history, rendered as the request is, is what the parent's prompt began with."""
    if not parent.redressed or parent.ids is None:
        return True
    # The prompt differs from its rendering where sampled ids are not those of their text: then nothing is proven.
    then = parent.asked if parent.asked is not None else parent.ids[: len(parent.ids) - parent.sampled]
    (now,) = yield Step((Rendering(parent.history[:-1], False),), required=False)
    return bool(len(now)) and shared_length(then, now) == len(now)


def _find_turn_end() -> Generator[Step, Sequence[Ids], Ids | None]:
    steps = turn_end()
    probes = yield Step(next(steps), required=False)
    if not all(len(probe) for probe in probes):
        return None
    try:
        steps.send(probes)
    except StopIteration as stop:
        close: Ids = stop.value
        return close
    raise AssertionError("the turn end is found in one step")


def _render_afresh(
    messages: Sequence[Message],
    branch_reason: str | None,
    close: Ids | None,
    continues: bool,
    media_of: Callable[[Rendering], Ranges],
) -> Steps:
    whole = Rendering(messages, True)
    (ids,) = yield Step((whole,), required=True)
    return Prompt(ids, branch_reason, ids, close, continues, media_of(whole)), whole


# The bridge: the ids that the template puts between a sampled reply and the next generation, proven from the engine's renderings.
#
# A call that continues its parent is sampled after `parent.prompt_ids + parent.completion_ids + bridge`. Sampled ids are never decoded
# and re-encoded; only the ids between them come from a rendering, and only with proof:
#
# - First proof. P is the rendering the parent was asked with, X renders history + reply without a generation prompt, Y renders
#   history + reply + tail with one. X begins with P and ends in the template's turn end, and Y begins with X: then the turn end and
#   Y[len(X):] are the suffix that follows the reply.
# - Second proof, for templates that render the last turn differently from earlier ones. Y and Y*, the same with another reply, share
#   a suffix that starts with the turn end, and Y begins with the rendering of the history alone.
#
# What the template drops is not bridged: if changing only the reply's reasoning changes nothing, the template hides the thinking from
# the deployed model, and if Y does not begin with the history, the history was rewritten. With `retain_thinking` both are still bridged
# if only thinking is missing: if the proof holds with every message's reasoning left out.
#
# The suffix is then joined to the sampled ids. Ids of the turn end that the model sampled are not repeated (also if the stop token
# doubles as the opener of the next turn, or ends only this kind of turn); a truncated reply gets the rest of the turn end, and one
# truncated while thinking first gets the template's end of thinking. Everything else is a Refusal with its reason, and the caller
# renders from scratch and branches.
#
# `derive` and `turn_end` are generators: they yield the renderings they need and are sent the ids; the caller does the I/O. After its
# first step `derive` yields made-up messages for the proof; for those that the template rejects, it is sent no ids.


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """The ids between the sampled reply and the next generation; their loss mask is 0."""

    ids: Ids


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no bridge is proven: history_rewritten, thinking_dropped, turn_end_unknown or turn_end_differs."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The parent's reply: its message as sent, its sampled ids, and whether the model ended the turn itself (the last id is a stop
    token) or was cut by length, abort or a stop string."""

    message: Message
    completion_ids: Ids
    closed: bool


Wanted = tuple[Rendering, ...]
Rendered = Sequence[Ids]


def turn_end() -> Generator[Wanted, Rendered, Ids]:
    """The ids, possibly none, with which the template ends an assistant turn: the common suffix of two short dialogues."""
    opening = {"role": "user", "content": "?"}
    dialogues = [(opening, {"role": "assistant", "content": content}) for content in ("x", "7")]
    left, right = yield tuple(Rendering(dialogue, False) for dialogue in dialogues)
    return _common_suffix(left, right)


BridgeSteps = Generator[Wanted, Rendered, "Bridge | Refusal"]


def derive(
    history: Sequence[Message],
    reply: Reply,
    tail: Sequence[Message],
    close: Ids,
    *,
    retain_thinking: bool,
    asked: Ids | None = None,
) -> BridgeSteps:
    """The bridge from `reply` to the generation after `tail`.

    `asked` is the rendering of `history` with a generation prompt, if known. The second rendering of the first step is the whole
    request's.
    """
    head = [*history, reply.message]
    first = (Rendering(head, False), Rendering([*head, *tail], True))
    if asked is None:
        ended, continued, asked = yield (*first, Rendering(history, True))
    else:
        ended, continued = yield first
    if not _starts_with(continued, ended) or not _starts_with(ended, asked):
        return (yield from _derive_by_substitution(history, reply, tail, close, continued, retain_thinking))
    end = (yield from _thinking_end(history, reply, close)) if _cut_in_thinking(reply) else close
    if end is None:
        return Refusal("turn_end_unknown" if retain_thinking else "thinking_dropped")
    joined = _join(reply, ended, end, continued[len(ended) :])
    if isinstance(joined, Refusal) or retain_thinking or _shows_sampled(ended, reply, close):
        return joined
    return Refusal("thinking_dropped") if (yield from _hides_thinking(history, reply, ended)) else joined


def _cut_in_thinking(reply: Reply) -> bool:
    """Whether the reply was cut before anything but thinking was sampled."""
    has_more = reply.message.get("content") or reply.message.get("tool_calls")
    return not reply.closed and bool(reasoning_of(reply.message)) and not has_more


def _thinking_end(history: Sequence[Message], reply: Reply, close: Ids) -> Generator[Wanted, Rendered, Ids | None]:
    """The ids with which the template ends a turn that only has thinking, including `close`; None if it hides thinking."""
    this, other = yield tuple(Rendering([*history, one], False) for one in (reply.message, _rethought(reply.message)))
    end = _common_suffix(this, other)
    return end if len(end) < len(this) and _ends_with(end, close) else None


def _shows_sampled(ended: Ids, reply: Reply, close: Ids) -> bool:
    """Whether a rendering that ends with the reply contains all its ids, thinking included, so that nothing is hidden."""
    sampled = reply.completion_ids[:-1] if reply.closed and len(close) else reply.completion_ids
    return not reasoning_of(reply.message) or _ends_with(ended, np.concatenate((sampled, close)))


def _hides_thinking(history: Sequence[Message], reply: Reply, ended: Ids) -> Generator[Wanted, Rendered, bool]:
    """Whether other reasoning would not change the rendering of history + reply."""
    (other,) = yield (Rendering([*history, _rethought(reply.message)], False),)
    return np.array_equal(other, ended)


def _derive_by_substitution(
    history: Sequence[Message],
    reply: Reply,
    tail: Sequence[Message],
    close: Ids,
    continued: Ids,
    retain_thinking: bool,
) -> BridgeSteps:
    alone, swapped, rethought = yield (
        Rendering(history, False),
        Rendering([*history, _other_reply(reply.message), *tail], True),
        Rendering([*history, _rethought(reply.message), *tail], True),
    )
    suffix = _common_suffix(continued, swapped)
    if not len(swapped) or not _starts_with(suffix, close):
        return Refusal("turn_end_unknown")
    dropped = bool(reasoning_of(reply.message)) and np.array_equal(rethought, continued)
    if dropped or not _starts_with(continued, alone):
        if not retain_thinking:
            return Refusal("thinking_dropped" if dropped else "history_rewritten")
        if not (yield from _only_thinking_is_gone(history, reply, tail, suffix)):
            return Refusal("history_rewritten")
    end = (yield from _thinking_end(history, reply, close)) if _cut_in_thinking(reply) else close
    if end is None:
        return Refusal("turn_end_unknown")
    return _join(reply, end, end, suffix[len(close) :])


def _only_thinking_is_gone(
    history: Sequence[Message], reply: Reply, tail: Sequence[Message], suffix: Ids
) -> Generator[Wanted, Rendered, bool]:
    """Whether, without any reasoning, the request's rendering begins with the history's and ends in the same suffix."""
    bare = [_bare(message) for message in history]
    alone, whole = yield (Rendering(bare, False), Rendering([*bare, _bare(reply.message), *tail], True))
    return _starts_with(whole, alone) and _ends_with(whole, suffix)


def _rethought(message: Message) -> dict[str, Any]:
    """The message with other reasoning."""
    return {**_bare(message), "reasoning_content": _unlike(reasoning_of(message))}


def _bare(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}


def _join(reply: Reply, shown: Ids, close: Ids, rest: Ids) -> Bridge | Refusal:
    """`shown` is the rendering up to the end of the reply's turn, or its known end; `rest` follows it."""
    sampled = reply.completion_ids
    usual = _ends_with(shown, close)
    if not reply.closed and usual:
        return Bridge(np.concatenate((close[_overlap(sampled, close) :], rest)))
    between = _after_stop(sampled, shown, close if usual else None, rest) if reply.closed and len(sampled) else None
    if between is None:
        return Refusal("turn_end_differs" if usual else "turn_end_unknown")
    return Bridge(between)


def _after_stop(sampled: Ids, shown: Ids, close: Ids | None, rest: Ids) -> Ids | None:
    """The ids after the stop token, the last of `sampled`; None if the template has no such token there."""
    stop = sampled[-1]
    if close is not None and len(close):
        for at in np.flatnonzero(close == stop).tolist():
            after = len(shown) - len(close) + at + 1
            # Ids between the reply and its stop token must have been sampled too.
            if len(_common_suffix(sampled, shown[:after])) > at:
                return np.concatenate((shown[after:], rest))
        return None
    if close is not None and len(rest) and rest[0] == stop:
        return rest[1:]
    # Another kind of turn, such as one with tool calls, may end in the token that the model sampled.
    return rest if len(shown) and shown[-1] == stop else None


def _overlap(sampled: Ids, end: Ids) -> int:
    """How many of the first ids of `end` are the last of `sampled`."""
    longest = min(len(sampled), len(end))
    return next((length for length in range(longest, 0, -1) if _ends_with(sampled, end[:length])), 0)


def _other_reply(message: Message) -> dict[str, Any]:
    content = message.get("content")
    return {"role": "assistant", "content": _unlike(content if isinstance(content, str) else "")}


def _unlike(text: str) -> str:
    """A short text whose last character differs from that of `text`."""
    return "7" if text.rstrip().endswith("x") else "x"


def _starts_with(ids: Ids, prefix: Ids) -> bool:
    return len(ids) >= len(prefix) and shared_length(ids, prefix) == len(prefix)


def _ends_with(ids: Ids, suffix: Ids) -> bool:
    return len(ids) >= len(suffix) and np.array_equal(ids[len(ids) - len(suffix) :], suffix)


def _common_suffix(left: Ids, right: Ids) -> Ids:
    length = shared_length(left[::-1], right[::-1])
    return left[len(left) - length :]
