"""Batches: lease ready groups, acknowledge them, give them back, hold them longer. For the trainer."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import re
from collections.abc import AsyncIterator, Callable, Container, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, Query, Request, Response
from fastapi.responses import StreamingResponse
from pydantic import Field

from proxy import rows
from proxy.api.closing import group_name, policy_of
from proxy.api.requests import Body, Form, Served, admin_only, body_of, form_of, json_response, trainer_only
from proxy.errors import NotFound, RequestError, VerbatimError
from proxy.rows import find_builder
from proxy.services import Services
from proxy.settings import Role
from proxy.store.delivery import LeaseTerms
from proxy.store.groups import DeadLetter, Lease, LeasedGroup, Nothing, PolicyLine
from proxy.store.keys import StoredValueError
from reconstruct.errors import ReconstructError
from reconstruct.roles import is_wanted
from reconstruct.trajectory import Trajectory, accounting_as_wire, as_wire, weighed

router = APIRouter(prefix="/batches", dependencies=[Depends(trainer_only)])

RECHECK_SECONDS = 5.0
"""How soon a waiting lease looks by itself, should nobody tell it that something came."""
UNNAMED = "a trainer"

LeaseSeconds = Annotated[float, Field(gt=0, le=7 * 86400)]


class LeaseRequest(Body):
    max_groups: int | None = Field(None, ge=1, le=65536)
    """At most so many groups; left out: as many as fit into max_trajectories, or one where that is left out too."""
    max_trajectories: int | None = Field(None, ge=1, le=2**31)
    """At most so many rows, in whole groups."""
    max_staleness: int | None = Field(None, ge=0, lt=2**53)
    """Versions that the oldest token of a group may lie behind the current weights."""
    wait_seconds: float = Field(0.0, ge=0, le=3600)
    """How long to wait for something to become ready."""
    lease_seconds: LeaseSeconds | None = None
    """How long it is held; left out: as the service is set."""
    consumer: str = Field("", max_length=256)
    """Who asks: ready groups are shared among consumers."""
    policy: str | None = Field(None, max_length=200)
    """Only rows of this model; left out: of all."""
    roles: list[Role] | None = Field(None, min_length=1)
    """Only rows of these roles; left out: of all that are trained. The others of the same groups are nobody's any more once it is
    acknowledged."""
    builder: str | None = Field(None, min_length=1, max_length=200)
    """How sessions are made into rows; left out: as the service is set, by whose rows groups are counted."""
    complete_only: bool = False
    """Only groups all of whose sessions are complete; the others stay for who takes them."""


class ExtendRequest(Body):
    lease_seconds: LeaseSeconds | None = None
    """From now on; left out: as the service is set."""


@router.post("/lease")
async def lease(request: Request, services: Served, body: Annotated[LeaseRequest, Depends(body_of(LeaseRequest))]) -> Response:
    form = form_of(request)
    async with _hung_up(request) as gone:
        batch = await _take(services, body, form, waits=body.wait_seconds > 0)
        if isinstance(batch, Nothing) and body.wait_seconds > 0:
            batch = await _wait_for(services, body, form, gone)
        if isinstance(batch, Batch) and gone.done():
            await _give_back(services, batch.lease_id)
    return batch.response(form) if isinstance(batch, Batch) else Response(status_code=204)


@router.post("/{lease_id}/ack")
async def ack(services: Served, lease_id: str) -> Response:
    return _settled(lease_id, await services.delivery.ack(lease_id, await services.clock.now()))


@router.post("/{lease_id}/nack")
async def nack(services: Served, lease_id: str) -> Response:
    return _settled(lease_id, await services.delivery.nack(lease_id, await services.clock.now()))


@router.post("/{lease_id}/extend")
async def extend(services: Served, lease_id: str, body: Annotated[ExtendRequest, Depends(body_of(ExtendRequest))]) -> Response:
    seconds = body.lease_seconds or services.settings.lease_seconds
    expires_at = await services.delivery.extend(lease_id, seconds, await services.clock.now())
    return json_response({"lease_id": lease_id, "expires_at": expires_at})


@router.get("")
async def overview(services: Served) -> Response:
    """Groups by state, and the newest dead letters with their reasons."""
    counts, (letters, _) = await asyncio.gather(services.delivery.counts(), services.delivery.dead_letters())
    return json_response({"groups": dict(counts), "dead_letters": [letter_as_wire(letter) for letter in letters]})


async def _wait_for(services: Services, body: LeaseRequest, form: Form, gone: asyncio.Task[None]) -> Batch | Nothing:
    """Ask again whenever something came or a lease of others ended, until the time is over, the caller has hung up or the service
    stops."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + body.wait_seconds
    async with _waiting(services, body.consumer or UNNAMED, gone), services.delivery.watch() as arrivals:
        while True:
            mark, left = arrivals.mark, deadline - loop.time()
            batch = await _take(services, body, form, waits=left > 0)
            if isinstance(batch, Batch) or left <= 0 or gone.done() or services.stopping.is_set():
                return batch
            pause = min(left, RECHECK_SECONDS, await _seconds_until(services, batch.due_at))
            await _first((arrivals.after(mark, pause), services.stopping.wait()), gone)


async def _first(coming: Iterable[Coroutine[Any, Any, Any]], gone: asyncio.Task[None]) -> None:
    """Return when any of them has happened."""
    tasks = [asyncio.create_task(each) for each in coming]
    try:
        await asyncio.wait((*tasks, gone), return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()


@contextlib.asynccontextmanager
async def _waiting(services: Services, consumer: str, gone: asyncio.Task[None]) -> AsyncIterator[None]:
    """Takes the consumer's claim away when its request is broken off: nobody else need heed it any longer."""
    ended = False
    try:
        yield
        ended = not gone.done()
    finally:
        if not ended:
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(services.delivery.leave(consumer))


@contextlib.asynccontextmanager
async def _hung_up(request: Request) -> AsyncIterator[asyncio.Task[None]]:
    """A task that is done when the caller has hung up. Its body must have been read."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    task = asyncio.create_task(watch())
    try:
        yield task
    finally:
        task.cancel()


async def _seconds_until(services: Services, due_at: float | None) -> float:
    """A little more than until then, so that it has come; a day when never."""
    return 86400.0 if due_at is None else max(0.0, due_at - await services.clock.now()) + 0.01


async def _give_back(services: Services, lease_id: str) -> None:
    await services.delivery.give_back(lease_id, await services.clock.now())


async def _take(services: Services, body: LeaseRequest, form: Form, *, waits: bool) -> Batch | Nothing:
    """What is ready for this consumer, with its rows."""
    if body.builder is not None:
        await asyncio.to_thread(find_builder, body.builder)
    while True:
        versions, settings = await current_versions(services), services.settings
        if body.policy is not None and body.policy not in versions:
            raise NotFound(f"there is no model {body.policy!r}", param="policy")
        lines = {policy: _line(version, body.max_staleness) for policy, version in versions.items()}
        line = lines.pop(DEFAULT)
        terms = LeaseTerms(
            consumer=body.consumer or UNNAMED,
            max_groups=body.max_groups,
            max_trajectories=body.max_trajectories,
            oldest_version=line.oldest_version,
            lease_seconds=body.lease_seconds or settings.lease_seconds,
            max_deliveries=settings.max_deliveries,
            now=await services.clock.now(),
            waits=waits,
            stale_groups=settings.stale_groups,
            version=line.version,
            policy=body.policy,
            complete_only=body.complete_only,
            named=lines,
        )
        taken = await services.delivery.lease(terms)
        if isinstance(taken, Nothing):
            return taken
        try:
            groups = await encode_groups(services, taken, RowTerms(form, body.roles, body.builder, body.complete_only))
        except BaseException:
            # Nobody gets these groups: the caller went away, which is a cancellation, or the store did.
            with contextlib.suppress(VerbatimError):
                await asyncio.shield(_give_back(services, taken.lease_id))
            raise
        if groups:
            return Batch(taken.lease_id, taken.expires_at, line.version, versions, groups)


def _line(version: int, max_staleness: int | None) -> PolicyLine:
    return PolicyLine(version, None if max_staleness is None else max(0, version - max_staleness))


def _settled(lease_id: str, refs: Any) -> Response:
    return json_response({"lease_id": lease_id, "groups": [group_name(ref) for ref in refs]})


# Leased groups as they go over the wire: rows encoded one by one in threads, sent piece by piece.
#
# A batch can be many megabytes. Encoded or written in one go it would hold the event loop, and with it every harness whose reply is
# being streamed, for as long as that takes.


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


# The current weight version of every policy, by which a lease and an admission measure age.


DEFAULT = ""


async def current_versions(services: Services) -> dict[str, int]:
    """By policy, the default one ("") first: those that have engines, and those whose rows lie in groups though they have none any more."""
    rows_of, engines_of = await services.delivery.policies(), services.pool.policy_names
    names = [DEFAULT, *sorted({*rows_of, *engines_of} - {DEFAULT})]
    states = await asyncio.gather(*(services.weights.current(name) for name in names))
    return {name: state.version for name, state in zip(names, states, strict=True)}


# Dead letters: groups that are not delivered any more, with the reason; delivered again or taken off the list. For the admin.


dead_letters_router = APIRouter(prefix="/batches/dead", dependencies=[Depends(admin_only)])

CURSOR = re.compile(r"[0-9.]+(e\+[0-9]+)?:[0-9]+[:/].+", re.DOTALL)


@dead_letters_router.get("")
async def listing(
    services: Served,
    cursor: str | None = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
    reason: str | None = None,
) -> Response:
    """Newest first; with `reason`, those whose reason contains it."""
    if cursor is not None and not CURSOR.fullmatch(cursor):
        raise RequestError(f"cursor: {cursor!r} is not one that this service gave", param="cursor")
    letters, following = await services.delivery.dead_letters(limit, cursor, reason)
    return json_response({"dead_letters": [letter_as_wire(letter) for letter in letters], "cursor": following})


@dead_letters_router.post("/{group:path}/retry")
async def retry(services: Served, group: str) -> Response:
    """Ready again, as if never delivered; a group that was given up incomplete waits for its members again."""
    done = await services.delivery.retry_dead(_names(group), policy_of(services.settings), await services.clock.now())
    return _done(group, done)


@dead_letters_router.delete("/{group:path}")
async def drop(services: Served, group: str) -> Response:
    """Off the list for good; its sessions stay until they are deleted."""
    return _done(group, await services.delivery.drop_dead(_names(group)))


def letter_as_wire(letter: DeadLetter) -> dict[str, Any]:
    return {
        "letter_id": letter.letter_id,
        "group_id": group_name(letter.group_id),
        "session_ids": list(letter.session_ids),
        "deliveries": letter.deliveries,
        "reason": letter.reason,
        "died_at": letter.died_at,
    }


def _names(group: str) -> tuple[str, ...]:
    """What the store may know it by: a letter's id, a group's, or that of a session without a group."""
    return group, f"g:{group}", f"s:{group}"


def _done(group: str, letters: Any) -> Response:
    if not letters:
        raise NotFound(f"there is no dead letter of {group!r}")
    return json_response({"letters": list(letters)})
