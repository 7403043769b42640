"""The bridge: what the template puts between a sampled reply and the next generation, proven from the engine's renderings.

A call that continues its parent is sampled after `parent.prompt_ids + parent.completion_ids + bridge`. Sampled ids are
never decoded and encoded again; only what stands between them is taken from a rendering, and only with proof:

- First proof. X renders history + reply without a generation prompt, Y renders history + reply + tail with one. X ends in the
  template's turn end and Y begins with X: then turn end + Y[len(X):] is the suffix that follows the reply.
- Second proof, for templates that show the last turn otherwise than earlier ones. Y and Y*, the same with another reply,
  share a suffix that starts with the turn end; P, the rendering the reply was asked with, is a prefix of both. If changing the
  reply's reasoning alone changes nothing in Y, the template has dropped it: allowed only with `retain_thinking`.

The suffix is then joined to the sampled ids: a stop token the model sampled is not repeated (also where it doubles as the
opener of the next turn); a reply cut short gets the whole turn end. Everything else is a Refusal with its reason, and the
caller renders afresh and branches.

`derive` and `turn_end` are generators: they yield the renderings they want and are sent the ids; the caller does the I/O.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from reconstruct.forest import shared_length
from reconstruct.messages import Message, reasoning_of
from reconstruct.records import Ids


@dataclass(frozen=True, slots=True)
class Rendering:
    """A rendering wanted of the engine: these messages under the call's tools and template kwargs."""

    messages: Sequence[Message]
    add_generation_prompt: bool


@dataclass(frozen=True, slots=True, eq=False)
class Bridge:
    """The ids between the sampled reply and the next generation; their loss mask is 0."""

    ids: Ids


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why no bridge could be proven: history_rewritten, thinking_dropped, turn_end_unknown or turn_end_differs."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Reply:
    """The parent's reply: its message as it was sent, its sampled ids, and whether the model ended the turn itself (a stop
    token is the last id) or was cut by length, abort or a stop string."""

    message: Message
    completion_ids: Ids
    closed: bool


Wanted = tuple[Rendering, ...]
Rendered = Sequence[Ids]


def turn_end() -> Generator[Wanted, Rendered, Ids]:
    """The ids with which the template ends an assistant turn (may be none): the common suffix of two short dialogues."""
    opening = {"role": "user", "content": "?"}
    dialogues = [(opening, {"role": "assistant", "content": content}) for content in ("x", "7")]
    left, right = yield tuple(Rendering(dialogue, False) for dialogue in dialogues)
    return _common_suffix(left, right)


def derive(
    history: Sequence[Message], reply: Reply, tail: Sequence[Message], close: Ids, *, retain_thinking: bool
) -> Generator[Wanted, Rendered, Bridge | Refusal]:
    """The bridge from `reply` to the generation after `tail`. The first rendering yielded last is that of the whole request."""
    head = [*history, reply.message]
    ended, continued = yield (Rendering(head, False), Rendering([*head, *tail], True))
    if _starts_with(continued, ended):
        if not _ends_with(ended, close):
            return Refusal("turn_end_unknown")
        return _join(reply, np.concatenate((close, continued[len(ended) :])))
    return (yield from _derive_by_substitution(history, reply, tail, close, continued, retain_thinking))


def _derive_by_substitution(
    history: Sequence[Message],
    reply: Reply,
    tail: Sequence[Message],
    close: Ids,
    continued: Ids,
    retain_thinking: bool,
) -> Generator[Wanted, Rendered, Bridge | Refusal]:
    other = _other_reply(reply.message)
    thought = {**reply.message, "reasoning_content": _unlike(reasoning_of(reply.message))}
    thought.pop("reasoning", None)
    asked, swapped, rethought = yield (
        Rendering(history, True),
        Rendering([*history, other, *tail], True),
        Rendering([*history, thought, *tail], True),
    )
    suffix = _common_suffix(continued, swapped)
    if len(close):
        start = _find(suffix, close)
        if start is None:
            return Refusal("turn_end_unknown")
        suffix = suffix[start:]
    dropped = bool(reasoning_of(reply.message)) and np.array_equal(rethought, continued)
    if dropped and not retain_thinking:
        return Refusal("thinking_dropped")
    if not _starts_with(continued, asked) and not retain_thinking:
        return Refusal("history_rewritten")
    return _join(reply, suffix)


def _join(reply: Reply, suffix: Ids) -> Bridge | Refusal:
    if not reply.closed:
        return Bridge(suffix)
    if not len(suffix) or not len(reply.completion_ids) or suffix[0] != reply.completion_ids[-1]:
        return Refusal("turn_end_differs")
    return Bridge(suffix[1:])


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


def _find(ids: Ids, wanted: Ids) -> int | None:
    """Where `wanted` first stands in `ids`."""
    for start in np.flatnonzero(ids[: len(ids) - len(wanted) + 1] == wanted[0]).tolist():
        if np.array_equal(ids[start : start + len(wanted)], wanted):
            return int(start)
    return None
