"""The prompt of a call: its parent's ids and a proven bridge, or a fresh rendering with the reason.

`plan` and the functions that prove a bridge are generators: they yield the renderings they need and are sent their ids. The service drives
it over vLLM's `/render`, and Verbatim's plugin inside vLLM with the engine's own renderer.

The bridge is what the template puts between a sampled reply and the next generation, proven from the engine's renderings.
A call that continues its parent is sampled after the parent's prompt, the ids that were sampled, and the bridge. Sampled ids are never
decoded and re-encoded; only the bridge comes from a rendering, and only with proof. Every rendering that a proof needs ends in a user's or
a tool's message and, but for the history alone, asks for a generation prompt: engines differ in all others. Some refuse what ends in a
reply, some add a generation prompt whether it is asked for or not, some show the last reply otherwise than earlier ones.

Y renders the whole request: history, reply, tail (what the harness added). P renders the history, as the parent was asked with it.

- *By ids.* Y begins with P and the sampled ids. Then the template writes these very ids there, and the rest of Y is the bridge.
- *By substitution*, where it writes the reply in other ids. All that the reply says is replaced in one rendering, all that the tail
  says in another. Y shares its end with the first, from `begin` on, and its beginning with the second, as far as `end`: nothing from
  `begin` on depends on what the reply says, nothing before `end` on what the tail says. So the reply stands before `begin`, all of the tail
  after `end`, and Y[begin:end] is glue: what closes the reply's syntax, its turn's end, the next turn's opener. If `begin` lies behind
  `end`, the template shows a part of the reply behind the tail, and there is no bridge. The glue cannot hold a turn end that somebody
  wrote, since all text of both is gone from it, so the one end token in it is the turn's. What follows that token in Y follows the
  sampled ids.

The sampled ids then stand where Y has the reply, so Y must say what they say, after what they were sampled after:

- Y begins with P, or with the history alone (a generation prompt may hold an empty thought that no history shows), which begins P. P is
  what the parent was asked with, so that another model's ids are not gone on from. Where that is no longer known, P is rendered now, and
  what comes before the first reply must be rendered as the parent's ids begin.
- Thinking must be shown: other thinking has to change Y. It stands in the reply's reasoning or, where the engine has no parser for it, in
  its content. With `retain_thinking` it may be missing, also from the history, if nothing else is: the same must hold with all thinking
  left out.

Ids of the turn end that the model sampled are not repeated. A reply that was cut, or that the model ended with another of its end tokens
than the template's, keeps what was sampled, and the template's own turn end follows. Everything else is a Refusal with its reason, and
the caller renders from scratch and branches.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import numpy as np

from reconstruct.media import Ranges, carry_ranges, collapse, count_media
from reconstruct.messages import Message, drop_thought, plain_content, reasoning_of, split_thought
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
class Bridge:
    """The ids between the sampled reply and the next generation; their loss mask is 0.

    `adds_end`: they begin with the template's turn end although the model ended the turn, with another token. `close` is the turn end, if
    the proof needed it."""

    ids: Ids
    adds_end: bool = False
    close: Ids | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Unproven:
    """Why no bridge is proven: history_rewritten, thinking_dropped, turn_end_unknown or turn_end_differs. `close` as in `Bridge`."""

    reason: str
    close: Ids | None = None


@dataclass(frozen=True, slots=True, eq=False)
class SampledReply:
    """The parent's reply: its message as sent, its sampled ids, and whether the model ended the turn itself (the last id is a stop
    token) or was cut by length, abort or a stop string."""

    message: Message
    completion_ids: Ids
    closed: bool


Wanted = tuple[Rendering, ...]
Rendered = Sequence[Ids]
BridgeSteps = Generator[Wanted, Rendered, Bridge | Unproven]


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The call that a request continues. `history` are the first messages of the request as the parent's lineage recorded them, the
    parent's reply last; `tail` are the others, with calls named as the lineage names them. `ids` are the parent's prompt and completion,
    the last `sampled` of them its completion; None: not known. `closed`: the model ended the turn itself. `asked` is what the template
    made of the parent's request, if known. `media` are the ranges of its images in `ids`.

    `other_render_key`: the parent's rendering depended on other things than messages (see reconstruct.messages.render_key), so that a
    rendering is to prove that it makes no difference."""

    history: Sequence[Message]
    tail: Sequence[Message]
    ids: Ids | None
    sampled: int
    closed: bool
    asked: Ids | None = None
    other_render_key: bool = False
    media: Ranges = ()


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The ids to sample after, and why they are a fresh rendering (None: they extend the parent, or there is none).

    `rendering` is what the template makes of the whole request, `close` its turn end, once known. `continues`: the request still
    continues its parent, which is False if that was rendered otherwise. `media` are the ranges of its images in `ids`. `adds_end`: the
    template's turn end follows a reply that the model ended with another token."""

    ids: Ids
    branch_reason: str | None
    rendering: Ids
    close: Ids | None
    continues: bool
    media: Ranges = ()
    adds_end: bool = False


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
    outcome, whole, rendering = yield from _prove(parent, close, retain_thinking)
    close = close if outcome.close is None else outcome.close
    if isinstance(outcome, Unproven):
        return (yield from _render_afresh(messages, outcome.reason, close, continues, media_of))
    ids, media = np.concatenate((parent.ids, outcome.ids)), media_of(whole)
    if media or parent.media:
        held = count_media(parent.history), count_media(parent.tail)
        carried = carry_ranges(parent.ids, parent.media, ids, rendering, media, *held)
        if carried is None or collapse(ids, carried) is None:
            return (yield from _render_afresh(messages, MEDIA_UNPLACED, close, continues, media_of))
        media = carried
    return Prompt(ids, None, rendering, close, continues, media, outcome.adds_end), whole


def _prove(
    parent: Parent, close: Ids | None, retain_thinking: bool
) -> Generator[Step, Sequence[Ids], tuple[Bridge | Unproven, Rendering, Ids]]:
    """The bridge, if there is one, and the rendering of the whole request with its ids."""
    assert parent.ids is not None
    *history, said = parent.history
    reply = SampledReply(said, parent.ids[len(parent.ids) - parent.sampled :], parent.closed)
    steps = derive(history, reply, parent.tail, close, retain_thinking=retain_thinking, asked=parent.asked)
    wanted = next(steps)
    whole, rendered = wanted[0], (yield Step(wanted, required=True))
    rendering = rendered[0]
    while True:
        try:
            wanted = steps.send(rendered)
        except StopIteration as stop:
            outcome: Bridge | Unproven = stop.value
            break
        rendered = yield Step(wanted, required=False)
    by_substitution = isinstance(outcome, Bridge) and outcome.close is not None
    if by_substitution and parent.asked is None and not (yield from _begins_alike(parent, parent.ids)):
        outcome = Unproven("history_rewritten", outcome.close)
    return outcome, whole, rendering


def _begins_alike(parent: Parent, ids: Ids) -> Generator[Step, Sequence[Ids], bool]:
    """Whether the engine renders what comes before the first reply as the row has it: another model may answer by now."""
    opening = list(takewhile(lambda message: message.get("role") != "assistant", parent.history))
    (now,) = yield Step((Rendering(opening, False),), required=False)
    return bool(len(now)) and _starts_with(ids, now)


def _renders_alike(parent: Parent) -> Generator[Step, Sequence[Ids], bool]:
    """Whether the parent's history, rendered as the request is, is what the parent's prompt began with."""
    if not parent.other_render_key or parent.ids is None:
        return True
    # The prompt differs from its rendering where sampled ids are not those of their text: then nothing is proven.
    then = parent.asked if parent.asked is not None else parent.ids[: len(parent.ids) - parent.sampled]
    (now,) = yield Step((Rendering(parent.history[:-1], False),), required=False)
    return bool(len(now)) and shared_length(then, now) == len(now)


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


# The proofs of a bridge.


def derive(
    history: Sequence[Message],
    reply: SampledReply,
    tail: Sequence[Message],
    close: Ids | None,
    *,
    retain_thinking: bool,
    asked: Ids | None = None,
) -> BridgeSteps:
    """The bridge from `reply` to the generation after `tail`.

    `close` is the turn end, if known. `asked` is the rendering of `history` with a generation prompt, if known. The first rendering of
    the first step is the whole request's. For the others, whose messages are made up, no ids may be sent.
    """
    first = Rendering([*history, reply.message, *tail], True)
    if asked is None:
        whole, asked = yield (first, Rendering(history, True))
    else:
        (whole,) = yield (first,)
    said = np.concatenate((asked, reply.completion_ids))
    # A reply of no ids cannot have been ended by the last of them.
    if shared_length(whole, said) == len(said) and (len(reply.completion_ids) or not reply.closed):
        return Bridge(whole[len(said) :])
    if close is None:
        close = yield from turn_end()
        if close is None:
            return Unproven("turn_end_unknown")
    outcome = yield from derive_by_substitution(history, reply, tail, close, asked, whole, retain_thinking)
    return replace(outcome, close=close)


def turn_end() -> Generator[Wanted, Rendered, Ids | None]:
    """The ids, possibly none, with which the template ends an assistant turn that others follow; None if it cannot be found.

    It is read off short dialogues, whose glue it begins. Where no rendering may end with a reply, or the last reply ends otherwise than
    earlier ones, nothing tells where it ends: then the opener of a user's turn is part of it."""
    question, other = {"role": "user", "content": "?"}, {"role": "user", "content": "7"}
    reply, swap = {"role": "assistant", "content": "x"}, {"role": "assistant", "content": "7"}
    dialogues = [[question, reply, question], [question, swap, question], [question, reply, other]]
    last = [Rendering([question, one], False) for one in (reply, swap)]
    whole, swapped, varied, *ended = yield (*(Rendering(dialogue, True) for dialogue in dialogues), *last)
    end = _common_suffix(*ended) if all(map(len, ended)) else None
    glue = _find_glue(whole, swapped, varied)
    if glue is None:
        return end
    between = whole[slice(*glue)]
    return end if end is not None and _starts_with(between, end) else between


def derive_by_substitution(
    history: Sequence[Message],
    reply: SampledReply,
    tail: Sequence[Message],
    close: Ids,
    asked: Ids,
    whole: Ids,
    retain_thinking: bool,
) -> BridgeSteps:
    """The second proof. `asked` is the rendering of `history` with a generation prompt, `whole` that of the whole request."""
    told = reply.message
    wanted = {
        "swapped": Rendering([*history, _replace_reply(told), *tail], True),
        "varied": Rendering([*history, told, *map(_replace_text, tail)], True),
    }
    if not _starts_with(whole, asked):
        wanted["alone"] = Rendering(history, False)
    if _thinks(told):
        wanted["rethought"] = Rendering([*history, _rethink(told), *tail], True)
    made = dict(zip(wanted, (yield tuple(wanted.values())), strict=True))
    glue = _find_glue(whole, made["swapped"], made["varied"])
    before = made.get("alone", asked)
    if glue is None or not len(before):
        return Unproven("turn_end_unknown")
    begin, end = glue
    hidden = "rethought" in made and np.array_equal(made["rethought"], whole)
    if hidden and not retain_thinking:
        return Unproven("thinking_dropped")
    if hidden or not _starts_with(whole, before):
        if not (yield from _only_thinking_is_gone(history, reply, tail, whole[begin:])):
            return Unproven("history_rewritten")
        if not retain_thinking:
            return Unproven("thinking_dropped")
    elif begin < len(before):
        # What the reply says is not shown at all.
        return Unproven("history_rewritten")
    if begin > end or not _starts_with(asked, before):
        return Unproven("history_rewritten")
    if reply.closed:
        return _join_closed(reply, whole, glue, close)
    missing = (yield from _find_thinking_end(history, reply, close)) if _is_cut_in_thinking(reply) else close
    return _join_cut(reply, whole, glue, close, missing)


def _find_glue(whole: Ids, swapped: Ids, varied: Ids) -> tuple[int, int] | None:
    """From where on `whole` is what it is with another reply, and as far as it is what it is with another tail."""
    if not (len(whole) and len(swapped) and len(varied)):
        return None
    return len(whole) - len(_common_suffix(whole, swapped)), shared_length(whole, varied)


def _only_thinking_is_gone(
    history: Sequence[Message], reply: SampledReply, tail: Sequence[Message], suffix: Ids
) -> Generator[Wanted, Rendered, bool]:
    """Whether there is thinking and, without any, the request's rendering begins with the history's and ends in the same suffix."""
    if not any(map(_thinks, (*history, reply.message))):
        return False
    bare = [_bare(message) for message in history]
    alone, whole = yield (Rendering(bare, False), Rendering([*bare, _bare(reply.message), *tail], True))
    return bool(len(alone)) and _starts_with(whole, alone) and _ends_with(whole, suffix)


# Where the glue is joined to the sampled ids.


def _join_closed(reply: SampledReply, whole: Ids, glue: tuple[int, int], close: Ids) -> Bridge | Unproven:
    begin, sampled = glue[0], reply.completion_ids
    if not len(sampled):
        return Unproven("turn_end_differs")
    between = whole[slice(*glue)]
    start, length = _find_close(between, close)
    ends = np.flatnonzero((between if start is None else between[: start + length]) == sampled[-1])
    if len(ends) == 1:
        stop = int(ends[0])
        # Ids between the reply and its stop token must have been sampled too.
        if start is not None and stop > start and not _ends_with(sampled, between[start : stop + 1]):
            return Unproven("turn_end_differs")
        return Bridge(whole[begin + stop + 1 :])
    if start is not None:
        return Bridge(whole[begin + start :], adds_end=True)
    # The template ends no turn. A token that opens turns asks for the turn that it opens, which is another than the next.
    if not len(close) and not reply.message.get("tool_calls") and sampled[-1] not in whole[:begin]:
        return Bridge(whole[begin:], adds_end=True)
    return Unproven("turn_end_unknown" if len(close) else "turn_end_differs")


def _join_cut(reply: SampledReply, whole: Ids, glue: tuple[int, int], close: Ids, missing: Ids | None) -> Bridge | Unproven:
    """`missing` are the ids, `close` last, that would end the turn; None if not known."""
    start, length = _find_close(whole[slice(*glue)], close)
    if not len(close) and not reply.message.get("tool_calls"):
        start = 0
    if start is None or missing is None:
        return Unproven("turn_end_unknown")
    end = missing[: len(missing) - len(close) + length]
    return Bridge(np.concatenate((end[_overlap(reply.completion_ids, end) :], whole[glue[0] + start + length :])))


def _find_close(between: Ids, close: Ids) -> tuple[int | None, int]:
    """Where the turn ends in the glue, None if that is not one place, and how many ids of `close` stand there."""
    if not len(close):
        return None, 0
    starts = np.flatnonzero(between == close[0])
    if len(starts) != 1:
        return None, 0
    start = int(starts[0])
    return start, shared_length(between[start:], close)


def _is_cut_in_thinking(reply: SampledReply) -> bool:
    """Whether the reply was cut before anything but thinking was sampled."""
    has_more = reply.message.get("content") or reply.message.get("tool_calls")
    return not reply.closed and bool(reasoning_of(reply.message)) and not has_more


def _find_thinking_end(history: Sequence[Message], reply: SampledReply, close: Ids) -> Generator[Wanted, Rendered, Ids | None]:
    """The ids with which the template ends a turn that only has thinking, including `close`; None if it hides thinking."""
    this, other = yield tuple(Rendering([*history, one], False) for one in (reply.message, _rethink(reply.message)))
    end = _common_suffix(this, other)
    return end if len(end) < len(this) and _ends_with(end, close) else None


# Messages that say something else.


def _replace_reply(message: Message) -> dict[str, Any]:
    """The reply with other words, and other arguments for the same tools: a template may take no result without its call."""
    calls = message.get("tool_calls") or ()
    content = message.get("content")
    changed = {**message, "content": _unlike(_text_of(content))} if content or not calls else dict(message)
    return {**changed, "tool_calls": [_replace_arguments(call) for call in calls]} if calls else changed


def _replace_arguments(call: Any) -> dict[str, Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    given = {"x": _unlike(text.rstrip("\"'}] \r\n"))}
    return {**call, "function": {**function, "arguments": json.dumps(given) if isinstance(arguments, str) else given}}


def _replace_text(message: Message) -> dict[str, Any]:
    """The message with another text, from its first character on."""
    return {**message, "content": _unlike(_text_of(message.get("content")).lstrip()[:1])}


def _text_of(content: Any) -> str:
    plain = plain_content(content)
    return plain if isinstance(plain, str) else "".join(part for part in plain if isinstance(part, str))


def _unlike(text: str) -> str:
    """A short text whose last character differs from that of `text`."""
    return "7" if text.rstrip().endswith("x") else "x"


def _thinks(message: Message) -> bool:
    return message.get("role") == "assistant" and (bool(reasoning_of(message)) or split_thought(message) is not None)


def _rethink(message: Message) -> dict[str, Any]:
    """The message with other thinking."""
    split = split_thought(message)
    if split is not None:
        thought, rest = split
        return {**message, "content": f"{thought}{_unlike(thought)}{rest}"}
    return {**_bare(message), "reasoning_content": _unlike(reasoning_of(message))}


def _bare(message: Message) -> dict[str, Any]:
    """The message without its thinking."""
    bare = {key: value for key, value in message.items() if key not in ("reasoning", "reasoning_content")}
    if message.get("role") == "assistant" and split_thought(message) is not None:
        bare["content"] = drop_thought(message["content"])
    return bare


# Ids.


def _overlap(sampled: Ids, end: Ids) -> int:
    """How many of the first ids of `end` are the last of `sampled`."""
    longest = min(len(sampled), len(end))
    return next((length for length in range(longest, 0, -1) if _ends_with(sampled, end[:length])), 0)


def _starts_with(ids: Ids, prefix: Ids) -> bool:
    return len(ids) >= len(prefix) and shared_length(ids, prefix) == len(prefix)


def _ends_with(ids: Ids, suffix: Ids) -> bool:
    return len(ids) >= len(suffix) and np.array_equal(ids[len(ids) - len(suffix) :], suffix)


def _common_suffix(left: Ids, right: Ids) -> Ids:
    length = shared_length(left[::-1], right[::-1])
    return left[len(left) - length :]
