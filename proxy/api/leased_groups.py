"""Leased groups as they go over the wire: rows encoded one by one in threads, sent piece by piece.

A batch can be many megabytes. Encoded or written in one go it would hold the event loop, and with it every harness whose reply is
being streamed, for as long as that takes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse

from proxy import rows
from proxy.api.answers import Form
from proxy.api.closing import group_name
from proxy.errors import NotFound
from proxy.services import Services
from proxy.store.groups import Lease, LeasedGroup
from proxy.store.packing import StoredValueError
from reconstruct.errors import ReconstructError
from reconstruct.trajectory import Trajectory, as_wire

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """`rows` are trajectories in the form of the answer. `stale` is said only when it is so."""

    group_id: str
    stale: bool
    rows: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class Batch:
    """`weight_version` is the default policy's, `weight_versions` has those of all."""

    lease_id: str
    expires_at: float
    weight_version: int
    weight_versions: Mapping[str, int]
    groups: Sequence[EncodedGroup]

    def response(self, form: Form) -> Response:
        pieces = list(self._json() if form is Form.JSON else self._msgpack())
        length = {"content-length": str(sum(map(len, pieces)))}
        return StreamingResponse(_chunks(pieces), headers=length, media_type=form.value)

    def _head(self) -> dict[str, Any]:
        versions = {"weight_version": self.weight_version, "weight_versions": self.weight_versions}
        return {"lease_id": self.lease_id, "expires_at": self.expires_at, **versions}

    def _json(self) -> Iterator[bytes]:
        yield msgspec.json.encode(self._head())[:-1] + b',"groups":['
        for number, group in enumerate(self.groups):
            yield (b"," if number else b"") + msgspec.json.encode(_group_head(group))[:-1] + b',"trajectories":['
            for place, row in enumerate(group.rows):
                yield b"," + row if place else row
            yield b"]}"
        yield b"]}"

    def _msgpack(self) -> Iterator[bytes]:
        yield _opened_map(self._head(), "groups", len(self.groups))
        for group in self.groups:
            yield _opened_map(_group_head(group), "trajectories", len(group.rows))
            yield from group.rows


async def encode_groups(services: Services, taken: Lease, form: Form) -> list[EncodedGroup]:
    """The leased groups with their rows. One that cannot be read, by this build at least, goes to the dead letters, or it would
    come up again and again."""
    groups = []
    for group in taken.groups:
        try:
            encoded = await _encode_group(services, group, form)
        except (NotFound, ReconstructError, StoredValueError) as error:
            log.error("group %s cannot be delivered: %s", group_name(group.group_id), error)
            await services.delivery.bury(taken.lease_id, group.reference, str(error), time.time())
            continue
        groups.append(EncodedGroup(group_name(group.group_id), group.stale, encoded))
    return groups


async def _encode_group(services: Services, group: LeasedGroup, form: Form) -> list[bytes]:
    members = await asyncio.gather(
        *(_encode_member(services, session_id, group.policies, form) for session_id in group.session_ids)
    )
    return [row for member in members for row in member]


async def _encode_member(services: Services, session_id: str, policies: Container[str], form: Form) -> list[bytes]:
    state = await services.sessions.mark_leased(session_id)
    if state is None:
        raise NotFound(f"session {session_id} was deleted")
    built = await rows.session_rows(services, state)
    return await asyncio.to_thread(_encode_rows, [row for row in built.rows if row.policy in policies], form)


def _encode_rows(built: Sequence[Trajectory], form: Form) -> list[bytes]:
    """One by one: an encoder keeps other threads from running until it returns."""
    encode: Callable[[Any], bytes] = msgspec.json.encode if form is Form.JSON else msgspec.msgpack.encode
    # Rows that are only shown, of roles that are not trained, stay with the session.
    return [encode(as_wire(row, arrays=form.arrays)) for row in built if row.loss_mask.any()]


def _group_head(group: EncodedGroup) -> dict[str, Any]:
    return {"group_id": group.group_id, "stale": True} if group.stale else {"group_id": group.group_id}


def _opened_map(head: dict[str, Any], key: str, items: int) -> bytes:
    """`head` as a msgpack map with one more entry, `key`, whose array of so many items is to follow."""
    encode = msgspec.msgpack.encode
    fields = b"".join(encode(name) + encode(value) for name, value in head.items())
    array = bytes([0x90 | items]) if items < 16 else b"\xdd" + items.to_bytes(4, "big")
    return bytes([0x80 | (len(head) + 1)]) + fields + encode(key) + array


async def _chunks(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    """The same bytes, neither in tiny nor in huge pieces."""
    waiting = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            waiting += piece[start : start + CHUNK_BYTES]
            if len(waiting) >= CHUNK_BYTES:
                yield bytes(waiting)
                waiting.clear()
    if waiting:
        yield bytes(waiting)
