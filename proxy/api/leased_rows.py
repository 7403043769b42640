"""Leased groups as they are sent: rows encoded one by one in threads, then streamed in chunks.

A batch can be many megabytes. Encoding or writing it in one go would block the event loop, and with it every reply being streamed to a
harness.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import Response
from fastapi.responses import StreamingResponse

from proxy import rows
from proxy.api.closing import group_name
from proxy.api.requests import Encoding
from proxy.errors import NotFound, RequestError
from proxy.services import Services
from proxy.store.groups import LeasedGroup, LeaseRecord
from proxy.store.keys import StoredValueError
from reconstruct.errors import ReconstructError
from reconstruct.roles import is_wanted
from reconstruct.trajectory import Trajectory, encode_accounting, encode_row, weigh_rows

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class RowTerms:
    """Which rows a lease delivers and how: None means all trained roles, the service's builder, all trained logprob modes."""

    form: Encoding
    roles: Container[str] | None = None
    builder: str | None = None
    complete_only: bool = False
    logprob_modes: Sequence[str] | None = None


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """`rows` are trajectories encoded in the form of the answer; `sessions` holds the accounting of each member."""

    group_id: str
    stale: bool
    sessions: Sequence[Mapping[str, Any]]
    rows: Sequence[bytes]

    def head(self) -> dict[str, Any]:
        """All fields but the trajectories. `stale` is present only if true."""
        stale = {"stale": True} if self.stale else {}
        return {"group_id": self.group_id, **stale, "sessions": self.sessions}


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """`weight_version` is the default policy's; `weight_versions` has those of all policies."""

    lease_id: str
    expires_at: float
    weight_version: int
    weight_versions: Mapping[str, int]
    groups: Sequence[EncodedGroup]

    def response(self, form: Encoding) -> Response:
        pieces = list(self._json() if form is Encoding.JSON else self._msgpack())
        length = {"content-length": str(sum(map(len, pieces)))}
        return StreamingResponse(_rechunk(pieces), headers=length, media_type=form.value)

    def _head(self) -> dict[str, Any]:
        versions = {"weight_version": self.weight_version, "weight_versions": self.weight_versions}
        return {"lease_id": self.lease_id, "expires_at": self.expires_at, **versions}

    def _json(self) -> Iterator[bytes]:
        yield msgspec.json.encode(self._head())[:-1] + b',"groups":['
        for number, group in enumerate(self.groups):
            yield (b"," if number else b"") + msgspec.json.encode(group.head())[:-1] + b',"trajectories":['
            for place, row in enumerate(group.rows):
                yield b"," + row if place else row
            yield b"]}"
        yield b"]}"

    def _msgpack(self) -> Iterator[bytes]:
        yield _open_map(self._head(), "groups", len(self.groups))
        for group in self.groups:
            yield _open_map(group.head(), "trajectories", len(group.rows))
            yield from group.rows


async def encode_groups(services: Services, lease: LeaseRecord, terms: RowTerms) -> list[EncodedGroup]:
    """The leased groups with their rows. A group that this build cannot read is buried among the dead letters; otherwise it would be
    leased over and over. Raises `RequestError` if the requested builder cannot build a group's rows, since another builder might."""
    groups = []
    for group in lease.groups:
        try:
            groups.append(await _encode_group(services, group, terms))
        except (NotFound, ReconstructError, StoredValueError) as error:
            name = group_name(group.group_id)
            if terms.builder is not None and isinstance(error, ReconstructError):
                raise RequestError(
                    f"the builder {terms.builder!r} makes no rows of group {name}: {error}", param="builder"
                ) from error
            log.error("group %s cannot be delivered: %s", name, error)
            await services.delivery.bury(lease.lease_id, group.reference, str(error), await services.clock.now())
    return groups


async def _encode_group(services: Services, group: LeasedGroup, terms: RowTerms) -> EncodedGroup:
    members = await asyncio.gather(
        *(_encode_member(services, session_id, group.policies, terms) for session_id in group.session_ids)
    )
    sessions, encoded = [session for session, _ in members], [row for _, own in members for row in own]
    return EncodedGroup(group_name(group.group_id), group.stale, sessions, encoded)


async def _encode_member(
    services: Services, session_id: str, policies: Container[str], terms: RowTerms
) -> tuple[dict[str, Any], list[bytes]]:
    """The session's accounting and its encoded rows."""
    state = await services.sessions.mark_leased(session_id)
    if state is None:
        raise NotFound(f"session {session_id} was deleted")
    built = await rows.session_rows(services, state, terms.builder, terms.logprob_modes)
    if terms.complete_only and not built.accounting.complete:
        raise ReconstructError(f"session {session_id} was complete when it was closed, and no longer is")
    session = {"session_id": session_id, **encode_accounting(built.accounting)}
    return session, await asyncio.to_thread(_encode_rows, _select(built.rows, policies, terms.roles), terms.form)


def _select(built: Sequence[Trajectory], policies: Container[str], roles: Container[str] | None) -> list[Trajectory]:
    """The rows to deliver, with weights shared among them. Rows of roles that are not trained are only ever shown."""
    trained = [row for row in built if row.loss_mask.any() and row.policy in policies]
    return weigh_rows([row for row in trained if roles is None or is_wanted(row.role, row.role_source, roles)])


def _encode_rows(selected: Sequence[Trajectory], form: Encoding) -> list[bytes]:
    """Row by row: an encoder holds the GIL until it returns."""
    encode: Callable[[Any], bytes] = msgspec.json.encode if form is Encoding.JSON else msgspec.msgpack.encode
    return [encode(encode_row(row, arrays=form.arrays)) for row in selected]


def _open_map(head: dict[str, Any], key: str, items: int) -> bytes:
    """`head` as a msgpack map with one more entry: `key`, an array whose `items` elements follow."""
    encode = msgspec.msgpack.encode
    fields = b"".join(encode(name) + encode(value) for name, value in head.items())
    array = bytes([0x90 | items]) if items < 16 else b"\xdd" + items.to_bytes(4, "big")
    return bytes([0x80 | (len(head) + 1)]) + fields + encode(key) + array


async def _rechunk(pieces: Sequence[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in chunks of about `CHUNK_BYTES`."""
    buffer = bytearray()
    for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            buffer += piece[start : start + CHUNK_BYTES]
            if len(buffer) >= CHUNK_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)
