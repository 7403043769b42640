"""What a fork replays: the recorded requests of its origin, in the order of recording, and what one of them makes of a request.

A request that was recorded before the pivot is answered with the replies that it got; the pivot and all others are sampled. Replies that
no harness got are left out: nothing came of them.
"""

from __future__ import annotations

import json
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from contract.sessions import Fork
from proxy.dialects.base import read_model
from proxy.images import images_in
from reconstruct.accounting import NOT_DELIVERED, settle
from reconstruct.codec import decode
from reconstruct.errors import DecodeError
from reconstruct.records import NOT_CHOSEN, Call, Forest, request_of

Stored = tuple[bytes, bytes]
"""The digest of a call's record, and the entry of a session's list that holds or names it."""


@dataclass(frozen=True, slots=True, eq=False)
class RecordedRequest:
    """The calls of its choices, and what a fork stores of each (see `Recording`). `replayed`: it was recorded before the pivot."""

    calls: Sequence[Call]
    stored: Sequence[Stored]
    replayed: bool

    @property
    def first(self) -> Call:
        return self.calls[0]


class Recording:
    """What `fork` replays: the origin's records, and of each the digest and the entry by which a fork refers to it. `refused` has the
    reason of each call that no fork can begin at. A damaged record is left out."""

    def __init__(self, fork: Fork, records: Sequence[bytes], stored: Sequence[Stored], delivered: Container[str]) -> None:
        self.fork = fork
        calls: dict[str, Call] = {}
        stored_by_id: dict[str, Stored] = {}
        for record, each in zip(records, stored, strict=True):
            try:
                call = decode(record)
            except DecodeError:
                continue
            calls[call.call_id] = call
            stored_by_id[call.call_id] = each
        settled = settle(calls.values(), delivered=delivered)
        self.forest: Forest = settled.forest
        self.refused: Mapping[str, str] = settled.refused
        self.sessions = frozenset(call.session_id for call in calls.values())
        self.size_bytes = sum(call.size_bytes for call in calls.values())
        self.images = frozenset(digest for call in calls.values() for digest in images_of(call))
        self.requests: list[RecordedRequest] = []
        self.pivot: RecordedRequest | None = None
        self._asked: dict[bytes, list[RecordedRequest]] = {}
        self._below: dict[str | None, list[RecordedRequest]] = {}
        self._models: dict[str, str] = {}
        self._policies: dict[str, str] = {}
        for call in self.forest.calls.values():
            model = read_model(call) or self._models.get(call.node.parent_id or "", "")
            self._models[call.call_id] = model
            self._policies.setdefault(model, call.policy)
        given = (call for call in calls.values() if call.call_id in self.forest)
        for group in _group_choices(
            call for call in given if self.refused.get(call.call_id) not in (NOT_DELIVERED, NOT_CHOSEN)
        ):
            found = any(call.call_id == fork.until for call in group)
            request = RecordedRequest(group, [stored_by_id[call.call_id] for call in group], self.pivot is None and not found)
            self.pivot = request if found else self.pivot
            self.requests.append(request)
            self._asked.setdefault(request.first.fingerprint, []).append(request)
            self._below.setdefault(request.first.node.parent_id, []).append(request)

    def find(self, fingerprint: bytes) -> Sequence[RecordedRequest]:
        """The requests of that history."""
        return self._asked.get(fingerprint, ())

    def below(self, parent_id: str | None) -> Sequence[RecordedRequest]:
        """The requests that continue the call; None: those that continue none."""
        return self._below.get(parent_id, ())

    def find_model(self, call: Call) -> str:
        """The model that the call asked for."""
        return self._models[call.call_id]

    def find_policy(self, model: str) -> str | None:
        """The policy that the model belonged to; None for a model that was not asked for."""
        return self._policies.get(model)


def _group_choices(calls: Iterable[Call]) -> list[list[Call]]:
    """The calls of each request: the choices of one are recorded in one step."""
    groups: list[list[Call]] = []
    for call in calls:
        if groups and request_of(groups[-1][0]) == request_of(call):
            groups[-1].append(call)
        else:
            groups.append([call])
    return groups


def images_of(call: Call) -> Iterator[str]:
    """The digests of the images in the call's own messages."""
    if b'"image"' in call.messages:
        for message in json.loads(call.messages):
            yield from images_in(message)
