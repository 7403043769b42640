"""Leased groups as they are sent: rows encoded one by one in threads, then streamed in chunks.

A batch can be gigabytes. A small one is built whole before its answer begins, so that whatever is wrong with it gets a status of its own. A
larger one never stands in memory whole: each further group is built when those before it have been sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
from fastapi import Response
from numpy.typing import NDArray
from starlette.types import Receive, Scope, Send

from proxy import rows
from proxy.api.closing import group_name
from proxy.api.requests import Encoding, watch_disconnect
from proxy.errors import NotFound, RequestError, VerbatimError
from proxy.services import Services
from proxy.store.groups import LeasedGroup, LeaseRecord
from proxy.store.keys import StoredValueError
from reconstruct.errors import ReconstructError
from reconstruct.roles import is_wanted
from reconstruct.trajectory import Trajectory, encode_accounting, encode_row, weigh_rows

log = logging.getLogger(__name__)

CHUNK_BYTES = 256 * 1024
SPELLED_NUMBERS = 2**14
"""Of a list that are encoded in one go."""
WHOLE_BYTES = 16 * 2**20
"""Encoded rows that are built before an answer begins; a batch with more of them is streamed."""


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

    def pieces(self, form: Encoding) -> Iterator[bytes]:
        # `stale` is present only if true.
        head = {"group_id": self.group_id, **({"stale": True} if self.stale else {}), "sessions": self.sessions}
        if form is Encoding.JSON:
            yield msgspec.json.encode(head)[:-1] + b',"trajectories":['
            for place, row in enumerate(self.rows):
                if place:
                    yield b","
                yield row
            yield b"]}"
        else:
            yield _open_map(head, "trajectories", len(self.rows))
            yield from self.rows


@dataclass(frozen=True, slots=True)
class EncodedBatch:
    """`groups` are built, at least one; those `left` are built while the answer is sent. `weight_version` is the default policy's;
    `weight_versions` has those of all policies."""

    lease: LeaseRecord
    weight_version: int
    weight_versions: Mapping[str, int]
    terms: RowTerms
    groups: Sequence[EncodedGroup]
    left: Sequence[LeasedGroup]

    async def pieces(self, services: Services) -> AsyncIterator[bytes]:
        """The whole answer. Raises `NotFound` when a group that is left cannot be delivered: its place cannot be left out any more."""
        is_json = self.terms.form is Encoding.JSON
        for piece in self._built():
            yield piece
        for group in self.left:
            encoded = await _encode_or_bury(services, self.lease, group, self.terms)
            if encoded is None:
                raise NotFound(f"group {group_name(group.group_id)} is no longer there")
            if is_json:
                yield b","
            for piece in encoded.pieces(self.terms.form):
                yield piece
        if is_json:
            yield b"]}"

    def count_bytes(self) -> int | None:
        """Of the answer; None if that is not known before the rest is built."""
        return None if self.left else sum(map(len, self._built())) + (2 if self.terms.form is Encoding.JSON else 0)

    def _built(self) -> Iterator[bytes]:
        versions = {"weight_version": self.weight_version, "weight_versions": self.weight_versions}
        head = {"lease_id": self.lease.lease_id, "expires_at": self.lease.expires_at, **versions}
        is_json = self.terms.form is Encoding.JSON
        if is_json:
            yield msgspec.json.encode(head)[:-1] + b',"groups":['
        else:
            yield _open_map(head, "groups", len(self.groups) + len(self.left))
        for number, group in enumerate(self.groups):
            if is_json and number:
                yield b","
            yield from group.pieces(self.terms.form)


class BatchResponse(Response):
    """Sends a batch. If the caller hangs up, or a group cannot be built, the answer breaks off before its end and the lease is given back:
    nobody can take what was sent for the whole batch."""

    def __init__(self, services: Services, batch: EncodedBatch) -> None:
        super().__init__(media_type=batch.terms.form.value)
        del self.headers["content-length"]
        if (size := batch.count_bytes()) is not None:
            self.headers["content-length"] = str(size)
        self._services = services
        self._batch = batch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        lease_id, whole = self._batch.lease.lease_id, False
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with watch_disconnect(receive) as gone:
                async for chunk in _rechunk(self._batch.pieces(self._services)):
                    if gone.done():
                        return
                    await send({"type": "http.response.body", "body": chunk, "more_body": True})
                    # `send` waits only for a client that reads slowly.
                    await asyncio.sleep(0)
            whole = True
        except VerbatimError as error:
            log.error("the answer to lease %s is broken off: %s", lease_id, error.message)
            return
        finally:
            if not whole:
                with contextlib.suppress(VerbatimError):
                    await asyncio.shield(give_back(self._services, lease_id))
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def give_back(services: Services, lease_id: str) -> None:
    """End a lease that nobody received."""
    await services.delivery.give_back(lease_id, await services.clock.now())


async def encode_groups(
    services: Services, lease: LeaseRecord, terms: RowTerms
) -> tuple[Sequence[EncodedGroup], Sequence[LeasedGroup]]:
    """The first of the leased groups with their rows, of WHOLE_BYTES or a little more, and those that are left. A group that this build
    cannot read is buried among the dead letters; otherwise it would be leased over and over. Raises `RequestError` if the requested builder
    cannot build a group's rows, since another builder might."""
    encoded: list[EncodedGroup] = []
    size = 0
    for place, group in enumerate(lease.groups):
        if size >= WHOLE_BYTES:
            left = lease.groups[place:]
            # Its refusal could not be told later.
            return encoded, left if terms.builder is None else await _check(services, lease, left, terms)
        if (one := await _encode_or_bury(services, lease, group, terms)) is not None:
            encoded.append(one)
            size += sum(map(len, one.rows))
    return encoded, ()


async def _check(
    services: Services, lease: LeaseRecord, groups: Sequence[LeasedGroup], terms: RowTerms
) -> Sequence[LeasedGroup]:
    """Those that can be delivered. Raises as `encode_groups` does."""
    return [group for group in groups if await _encode_or_bury(services, lease, group, terms) is not None]


async def _encode_or_bury(services: Services, lease: LeaseRecord, group: LeasedGroup, terms: RowTerms) -> EncodedGroup | None:
    try:
        return await _encode_group(services, group, terms)
    except (NotFound, ReconstructError, StoredValueError) as error:
        name = group_name(group.group_id)
        if terms.builder is not None and isinstance(error, ReconstructError):
            raise RequestError(
                f"the builder {terms.builder!r} makes no rows of group {name}: {error}", param="builder"
            ) from error
        log.error("group %s cannot be delivered: %s", name, error)
        await services.delivery.bury(lease.lease_id, group.reference, str(error), await services.clock.now())
        return None


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
    """Row by row, and lists of numbers in pieces: an encoder holds the GIL until it returns."""
    encode: Callable[[Any], bytes] = msgspec.json.encode if form is Encoding.JSON else msgspec.msgpack.encode
    spell = None if form is Encoding.PACKED else partial(spell_numbers, form=form)
    return [encode(encode_row(row, arrays=form.arrays, spell=spell)) for row in selected]


def spell_numbers(array: NDArray[Any], form: Encoding) -> msgspec.Raw:
    """The list of the array's numbers, as `form` encodes it."""
    parts = (array[start : start + SPELLED_NUMBERS].tolist() for start in range(0, len(array), SPELLED_NUMBERS))
    if form is Encoding.JSON:
        return msgspec.Raw(b"[" + b",".join(msgspec.json.encode(part)[1:-1] for part in parts) + b"]")
    encoded = [msgspec.msgpack.encode(part)[len(_begin_list(len(part))) :] for part in parts]
    return msgspec.Raw(_begin_list(len(array)) + b"".join(encoded))


def _begin_list(items: int) -> bytes:
    """The head of a msgpack array, in the shortest form."""
    if items < 16:
        return bytes([0x90 | items])
    return b"\xdc" + items.to_bytes(2, "big") if items < 2**16 else b"\xdd" + items.to_bytes(4, "big")


def _open_map(head: dict[str, Any], key: str, items: int) -> bytes:
    """`head` as a msgpack map with one more entry: `key`, an array whose `items` elements follow."""
    encode = msgspec.msgpack.encode
    fields = b"".join(encode(name) + encode(value) for name, value in head.items())
    array = bytes([0x90 | items]) if items < 16 else b"\xdd" + items.to_bytes(4, "big")
    return bytes([0x80 | (len(head) + 1)]) + fields + encode(key) + array


async def _rechunk(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The same bytes in chunks of about `CHUNK_BYTES`."""
    buffer = bytearray()
    async for piece in pieces:
        for start in range(0, len(piece), CHUNK_BYTES):
            buffer += piece[start : start + CHUNK_BYTES]
            if len(buffer) >= CHUNK_BYTES:
                yield bytes(buffer)
                buffer.clear()
    if buffer:
        yield bytes(buffer)
