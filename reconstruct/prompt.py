"""The prompt of a call: its parent's ids and a proven bridge, or a fresh rendering with the reason.

`plan` is a generator as those of `reconstruct.bridge` are: it yields the renderings it needs and is sent their ids. The service drives
it over vLLM's `/render`, and Verbatim's plugin inside vLLM with the engine's own renderer.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass

import numpy as np

from reconstruct.bridge import Bridge, Refusal, Rendering, Reply, derive, turn_end
from reconstruct.forest import shared_length
from reconstruct.messages import Message
from reconstruct.records import Ids

IDS_UNKNOWN = "ids_unknown"
"""Why a call does not extend its parent: the engine did not tell the ids of one of the two."""


@dataclass(frozen=True, slots=True, eq=False)
class Parent:
    """The call that a request continues. `history` are the first messages of the request as the parent's lineage recorded them, the
    parent's reply last; `tail` are the others, with calls named as the lineage names them. `ids` are the parent's prompt and completion,
    the last `sampled` of them its completion; None: not known. `closed`: the model ended the turn itself. `asked` is what the template
    made of the parent's request, if known.

    `redressed`: the parent's rendering depended on other things than messages (see reconstruct.messages.dress), so that a rendering is
    to prove that it makes no difference."""

    history: Sequence[Message]
    tail: Sequence[Message]
    ids: Ids | None
    sampled: int
    closed: bool
    asked: Ids | None = None
    redressed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """The ids to sample after, and why they are a fresh rendering (None: they extend the parent, or there is none).

    `rendering` is what the template makes of the whole request, `close` its turn end, once known. `continues`: the request still
    continues its parent, which is False if that was rendered otherwise."""

    ids: Ids
    branch_reason: str | None
    rendering: Ids
    close: Ids | None
    continues: bool


@dataclass(frozen=True, slots=True)
class Step:
    """Renderings to answer with their ids. If not `required`, one that the template rejects is answered with no ids: the messages are
    made up for a proof."""

    renderings: tuple[Rendering, ...]
    required: bool


Steps = Generator[Step, Sequence[Ids], tuple[Prompt, Rendering]]


def plan(messages: Sequence[Message], parent: Parent | None, close: Ids | None, *, retain_thinking: bool) -> Steps:
    """The prompt of `messages`, and which of the renderings was that of the whole request. `close` is the template's turn end, if known
    from an earlier call."""
    continues = parent is not None and (yield from _renders_alike(parent))
    if parent is None or not continues or not parent.tail:
        return (yield from _render_afresh(messages, None, close, continues))
    if parent.ids is None:
        return (yield from _render_afresh(messages, IDS_UNKNOWN, close, continues))
    if close is None:
        close = yield from _find_turn_end()
        if close is None:
            return (yield from _render_afresh(messages, "turn_end_unknown", None, continues))
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
        return (yield from _render_afresh(messages, outcome.reason, close, continues))
    return Prompt(np.concatenate((parent.ids, outcome.ids)), None, rendering, close, continues), whole


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


def _render_afresh(messages: Sequence[Message], branch_reason: str | None, close: Ids | None, continues: bool) -> Steps:
    whole = Rendering(messages, True)
    (ids,) = yield Step((whole,), required=True)
    return Prompt(ids, branch_reason, ids, close, continues), whole
