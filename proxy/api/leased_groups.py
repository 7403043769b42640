"""Leased groups as they go over the wire: rows encoded one by one in threads, sent piece by piece.

A batch can be many megabytes. Encoded or written in one go it would hold the event loop, and with it every harness whose reply is
being streamed, for as long as that takes.
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
from proxy.api.answers import Form
from proxy.api.closing import group_name
from proxy.errors import NotFound, RequestError
from proxy.services import Services
from proxy.store.groups import Lease, LeasedGroup
from proxy.store.packing import StoredValueError
from reconstruct.errors import ReconstructError
from reconstruct.roles import is_wanted
from reconstruct.trajectory import Trajectory, accounting_as_wire, as_wire, weighed

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024


@dataclass(frozen=True, slots=True)
class EncodedGroup:
    """`rows` are trajectories in the form of the answer, `sessions` what became of all that was sampled in each member. `stale` is said
    only when it is so."""

    group_id: str
    stale: bool
    sessions: Sequence[Mapping[str, Any]]
    rows: Sequence[bytes]


@dataclass(frozen=True, slots=True)
class RowTerms:
    """How rows are wanted: the answer's form, the roles (None: all that are trained), the builder (None: the service's), and whether
    sessions must be complete."""

    form: Form
    roles: Container[str] | None = None
    builder: str | None = None
    complete_only: bool = False


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


async def encode_groups(services: Services, taken: Lease, terms: RowTerms) -> list[EncodedGroup]:
    """The leased groups with their rows. One that cannot be read, by this build at least, goes to the dead letters, or it would
    come up again and again. Raises RequestError where the builder that was asked for cannot make rows of one: others can."""
    groups = []
    for group in taken.groups:
        try:
            groups.append(await _encode_group(services, group, terms))
        except (NotFound, ReconstructError, StoredValueError) as error:
            if terms.builder is not None and isinstance(error, ReconstructError):
                name = group_name(group.group_id)
                raise RequestError(
                    f"the builder {terms.builder!r} makes no rows of group {name}: {error}", param="builder"
                ) from error
            log.error("group %s cannot be delivered: %s", group_name(group.group_id), error)
            await services.delivery.bury(taken.lease_id, group.reference, str(error), await services.clock.now())
    return groups


async def _encode_group(services: Services, group: LeasedGroup, terms: RowTerms) -> EncodedGroup:
    members = await asyncio.gather(
        *(_encode_member(services, session_id, group.policies, terms) for session_id in group.session_ids)
    )
    sessions, encoded = [told for told, _ in members], [row for _, made in members for row in made]
    return EncodedGroup(group_name(group.group_id), group.stale, sessions, encoded)


async def _encode_member(
    services: Services, session_id: str, policies: Container[str], terms: RowTerms
) -> tuple[dict[str, Any], list[bytes]]:
    state = await services.sessions.mark_leased(session_id)
    if state is None:
        raise NotFound(f"session {session_id} was deleted")
    built = await rows.session_rows(services, state, terms.builder)
    if terms.complete_only and not built.accounting.complete:
        raise ReconstructError(f"session {session_id} was complete when it was closed, and is not any more")
    told = {"session_id": session_id, **accounting_as_wire(built.accounting)}
    return told, await asyncio.to_thread(_encode_rows, _wanted(built.rows, policies, terms.roles), terms.form)


def _wanted(built: Sequence[Trajectory], policies: Container[str], roles: Container[str] | None) -> list[Trajectory]:
    """The rows that are given, their weights shared among them. Rows that are only shown, of roles that are not trained, stay with the
    session."""
    trained = [row for row in built if row.loss_mask.any() and row.policy in policies]
    return weighed([row for row in trained if roles is None or is_wanted(row.role, row.role_source, roles)])


def _encode_rows(given: Sequence[Trajectory], form: Form) -> list[bytes]:
    """One by one: an encoder keeps other threads from running until it returns."""
    encode: Callable[[Any], bytes] = msgspec.json.encode if form is Form.JSON else msgspec.msgpack.encode
    return [encode(as_wire(row, arrays=form.arrays)) for row in given]


def _group_head(group: EncodedGroup) -> dict[str, Any]:
    stale = {"stale": True} if group.stale else {}
    return {"group_id": group.group_id, **stale, "sessions": group.sessions}


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
