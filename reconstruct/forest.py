"""The forest: the calls of one session, their parents, and the ids each was sampled after.

Invariant, of calls whose ids are known:
`full_ids(c) == prompt_ids(c) + completion_ids(c)` and `prompt_ids(c) == full_ids(base)[:base_length] + delta_ids`;
a base is added before the calls that refer to it. All walks are loops, so any depth works. The forest holds only deltas; a prompt is
assembled on request.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from reconstruct.errors import LengthMismatch, UnknownParent
from reconstruct.media import Media, overlapping, shift
from reconstruct.records import CONTROL_TOKENS, NOT_CHOSEN, Call, Ids, Node, order_key


class Forest:
    """The calls of one session in insertion order, with indexes to find a parent. `detailed`: a call has details; `controlled`: a call
    has control tokens in its messages; `has_media`: a call's prompt has media."""

    def __init__(self, calls: Iterable[Call] = ()) -> None:
        self.calls: dict[str, Call] = {}
        self._by_reply: dict[bytes, list[str]] = {}
        self._by_prompt: dict[bytes, list[str]] = {}
        self._children: dict[str | None, list[str]] = {}
        self._lengths: dict[str, int] = {}
        self._owners: dict[str, str | None] = {}
        self._extended: dict[str, str] = {}
        """The parent of each call that extends it."""
        self.detailed = False
        self.controlled = False
        self.has_media = False
        for call in calls:
            self.add(call)

    def __len__(self) -> int:
        return len(self.calls)

    def __contains__(self, call_id: object) -> bool:
        return call_id in self.calls

    def add(self, call: Call) -> None:
        """Add one call; adding it again is a no-op.

        Raises UnknownParent if its parent or base is missing, LengthMismatch if its base is shorter than `base_length` or has media that
        this cuts apart.
        """
        if call.call_id in self.calls:
            return
        node = call.node
        for named in (node.parent_id, node.base_id):
            if named is not None and named not in self.calls:
                raise UnknownParent(f"call {named} is not in the session", session_id=call.session_id, call_id=call.call_id)
        available = self._lengths[node.base_id] if node.base_id is not None else 0
        if not 0 <= node.base_length <= available:
            raise LengthMismatch(
                f"the base has {available} ids, fewer than the {node.base_length} referred to",
                session_id=call.session_id,
                call_id=call.call_id,
            )
        if self.has_media and node.base_id is not None and self._cuts_media(node.base_id, node.base_length):
            raise LengthMismatch(
                f"the first {node.base_length} ids of the base end within a media range",
                session_id=call.session_id,
                call_id=call.call_id,
            )
        self.calls[call.call_id] = call
        self._lengths[call.call_id] = node.base_length + len(node.delta_ids) + len(node.completion_ids)
        self._owners[call.call_id] = self._owner(node.base_id, node.base_length)
        if call.quarantine_reason != NOT_CHOSEN:
            self._by_reply.setdefault(call.reply_fingerprint, []).append(call.call_id)
            self._by_prompt.setdefault(call.fingerprint, []).append(call.call_id)
        self._children.setdefault(node.parent_id, []).append(call.call_id)
        self.detailed = self.detailed or node.details is not None
        self.controlled = self.controlled or CONTROL_TOKENS in call.marks
        self.has_media = self.has_media or bool(node.media)
        if node.parent_id is not None and self._begins_with(call, node.parent_id):
            self._extended[call.call_id] = node.parent_id

    def children(self, call_id: str | None) -> Sequence[str]:
        return self._children.get(call_id, ())

    def find_by_reply(self, fingerprint: bytes) -> Sequence[str]:
        """The calls whose history including the reply hashes to `fingerprint`, oldest first."""
        return self._by_reply.get(fingerprint, ())

    def find_by_prompt(self, fingerprint: bytes) -> Sequence[str]:
        """The calls whose request hashes to `fingerprint`, oldest first."""
        return self._by_prompt.get(fingerprint, ())

    def full_length(self, call_id: str) -> int:
        return self._lengths[call_id]

    def prompt_length(self, call_id: str) -> int:
        return self._lengths[call_id] - len(self.calls[call_id].node.completion_ids)

    def full_ids(self, call_id: str) -> Ids:
        return self.prefix(call_id, self._lengths[call_id])

    def known_ids(self, call_id: str) -> Ids | None:
        """All ids of the call's prompt and completion; None if its engine did not report them."""
        return self.full_ids(call_id) if self.calls[call_id].ids_known else None

    def prompt_ids(self, call_id: str) -> Ids:
        return self.prefix(call_id, self.prompt_length(call_id))

    def prefix(self, call_id: str, length: int) -> Ids:
        """The first `length` ids of the call's prompt and completion, as read-only int32 of shape (length,)."""
        parts = []
        for owner, start, end in self.pieces(call_id, length):
            node, own = self.calls[owner].node, end - start
            if own > len(node.delta_ids):
                parts.append(node.completion_ids[: own - len(node.delta_ids)])
            parts.append(node.delta_ids[:own])
        parts.reverse()
        ids = np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
        ids.flags.writeable = False
        return ids

    def media(self, call_id: str) -> tuple[Media, ...]:
        """The media of the call's prompt, by positions in it."""
        return self.prefix_media(call_id, self._lengths[call_id]) if self.has_media else ()

    def prefix_media(self, call_id: str, length: int) -> tuple[Media, ...]:
        """Those of the first `length` ids of the call's prompt and completion."""
        parts = [
            [each for each in shift(self.calls[owner].node.media, start) if each.end <= end]
            for owner, start, end in self.pieces(call_id, length)
        ]
        return tuple(each for part in reversed(parts) for each in part)

    def pieces(self, call_id: str, length: int) -> Iterator[tuple[str, int, int]]:
        """The calls that store the first `length` ids of the call's prompt and completion, each as (call, start, end), last first."""
        current = self._owner(call_id, length)
        while current is not None:
            start = self.calls[current].node.base_length
            yield current, start, length
            length = start
            current = self._owners[current]

    def extends(self, call_id: str) -> bool:
        """Whether the call's prompt is all of its parent's ids followed by its own, so that one row may contain both.

        Those ids may be stored elsewhere: the choices of one request refer to the first of them.
        """
        return call_id in self._extended

    def extended_by(self, call_id: str) -> str | None:
        """The parent that the call extends; None if it extends none."""
        return self._extended.get(call_id)

    def branch(self, call_id: str) -> list[str]:
        """The calls of the row that ends at `call_id`, first to last: back while each extends its parent."""
        path = [call_id]
        while (parent_id := self.extended_by(path[-1])) is not None:
            path.append(parent_id)
        path.reverse()
        return path

    def lineage(self, call_id: str | None) -> Iterator[Call]:
        """The call and its ancestors, whether or not they share tokens."""
        while call_id is not None:
            call = self.calls[call_id]
            yield call
            call_id = call.node.parent_id

    def in_order(self) -> list[Call]:
        return sorted(self.calls.values(), key=order_key)

    def _owner(self, call_id: str | None, length: int) -> str | None:
        """The call, or the base of it, that stores the last of its first `length` ids; None for no ids.

        The owner of each call's base is cached, so a walk takes one step per call that stores ids of the prompt, however long the
        chain of references.
        """
        if length <= 0:
            return None
        while call_id is not None and length <= self.calls[call_id].node.base_length:
            call_id = self._owners[call_id]
        return call_id

    def _begins_with(self, call: Call, parent_id: str) -> bool:
        if self._lengths[parent_id] > self.prompt_length(call.call_id):
            return False
        if not self.calls[parent_id].ids_known:
            return False
        # A row belongs to one policy: its weight versions are that policy's.
        if self.calls[parent_id].policy != call.policy:
            return False
        return self._agree(call.call_id, parent_id, self._lengths[parent_id])

    def _cuts_media(self, call_id: str, length: int) -> bool:
        owner = self._owner(call_id, length)
        node = self.calls[owner].node if owner is not None else None
        return node is not None and any(each.start < length - node.base_length < each.end for each in node.media)

    def _agree(self, left_id: str, right_id: str, length: int) -> bool:
        """Whether both calls have the same first `length` ids, and the same media behind them. Only ids not shared through bases are
        compared: none for a call whose base is all of its parent."""
        left, right = self._owner(left_id, length), self._owner(right_id, length)
        # Both are None once no ids are left.
        while left is not None and right is not None and left != right:
            one, other = self.calls[left].node, self.calls[right].node
            start = max(one.base_length, other.base_length)
            if not np.array_equal(_own_ids(one, start, length), _own_ids(other, start, length)):
                return False
            if self.has_media and _own_media(one, start, length) != _own_media(other, start, length):
                return False
            length = start
            left, right = self._owner(left, length), self._owner(right, length)
        return True


def _own_ids(node: Node, start: int, end: int) -> Ids:
    """The node's own ids (delta, then completion) at positions `start:end`, which are after its base."""
    start, end, delta = start - node.base_length, end - node.base_length, len(node.delta_ids)
    if end <= delta:
        return node.delta_ids[start:end]
    if start >= delta:
        return node.completion_ids[start - delta : end - delta]
    return np.concatenate((node.delta_ids[start:], node.completion_ids[: end - delta]))


def _own_media(node: Node, start: int, end: int) -> list[Media]:
    """The node's own media with ids at positions `start:end`."""
    return overlapping(shift(node.media, node.base_length), start, end)
