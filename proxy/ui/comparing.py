"""Two sessions beside each other: where their main branches part, in messages and in tokens, and what each said from there on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from proxy.ui.looks import Look
from proxy.ui.shown_messages import ShownMessage, conversation, shown_message
from reconstruct.forest import shared_length
from reconstruct.messages import canonical_json
from reconstruct.records import Call

COMPARED = 400
"""Messages of each side at most."""
SHOWN_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Pair:
    """What stands at one place in both conversations; None where one has ended."""

    left: ShownMessage | None
    right: ShownMessage | None
    same: bool


@dataclass(frozen=True, slots=True)
class Comparison:
    """`last` is the call whose conversation is shown of each side. `same_messages` and `same_tokens` are how many both begin with."""

    left: Call | None
    right: Call | None
    pairs: Sequence[Pair]
    same_messages: int
    same_tokens: int
    left_out: int


def compare(left: Look, right: Look) -> Comparison:
    one, other = last_call(left), last_call(right)
    first, second = (conversation(look, call) if call else [] for look, call in ((left, one), (right, other)))
    pairs = [
        _pair(index, mine, theirs, len(first), len(second)) for index, (mine, theirs) in enumerate(zip_longest(first, second))
    ]
    same = next((index for index, pair in enumerate(pairs) if not pair.same), len(pairs))
    tokens = shared_length(left.forest.full_ids(one.call_id), right.forest.full_ids(other.call_id)) if one and other else 0
    return Comparison(one, other, pairs[:COMPARED], same, tokens, max(0, len(pairs) - COMPARED))


def last_call(look: Look) -> Call | None:
    """The end of the session's longest branch of the role main; of any role where there is none."""
    lines = [line for line in look.lines if line.in_tree]
    of_main = [line for line in lines if line.role == "main"] or lines
    if not of_main:
        return None
    longest = max(of_main, key=lambda line: (line.prompt_tokens + line.sampled_tokens, line.number))
    return look.forest.calls[longest.call_id]


def _pair(index: int, left: Any, right: Any, left_count: int, right_count: int) -> Pair:
    return Pair(
        _shown(index, left, is_reply=index == left_count - 1),
        _shown(index, right, is_reply=index == right_count - 1),
        left is not None and right is not None and _said(left) == _said(right),
    )


def _shown(index: int, message: Any, *, is_reply: bool) -> ShownMessage | None:
    return None if message is None else shown_message(index, message, is_reply=is_reply, most=SHOWN_CHARACTERS)


def _said(message: Any) -> bytes:
    """What a message says, without the ids that name its calls: those differ where nothing else does."""
    if not isinstance(message, dict):
        return canonical_json(message)
    calls = [call.get("function") for call in message.get("tool_calls") or () if isinstance(call, dict)]
    return canonical_json({**message, "tool_call_id": None, "tool_calls": calls or None})
