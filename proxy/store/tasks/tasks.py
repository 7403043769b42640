"""Tasks in Redis, as servers see them: submitted, listed, watched, cancelled, and finished off once they have ended."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import msgspec

from contract.attempts import ENDED, UNDER_WAY, AttemptId, FailureRecord, NodeState, RolloutState, Status, Verdict
from contract.tasks import Task
from proxy.errors import Conflict, NotFound
from proxy.store.connection import Argument, StoreConnection
from proxy.store.keys import pack_versioned
from proxy.store.service import RedisClock
from proxy.store.tasks import keys
from proxy.store.tasks.values import Callback, Event, RolloutCounts, TaskState, outline, unpack_checked

LOADED_AT_ONCE = 64
LOOKED_AT = 2048
"""Listed tasks after which a page ends that has found something: a short page may have a cursor, an empty one is the last."""
STRANDED_AT_ONCE = 1000
"""Waiting rollouts of one queue that are noted at once as stranded."""
EVENTS_AT_ONCE = 500
LOOK_SECONDS = 0.3
"""Pause between two reads of a running task's events."""
CLAIM_SECONDS = 60.0
"""How long due work is left to the server that claimed it."""


LIVING_SECONDS = 120.0
"""How recent a node's last beat must be to count: one that is being replaced is not missed at once."""

STATUSES: tuple[Status, ...] = ("queued", *UNDER_WAY, *ENDED)
LISTED = (
    *("outline", "status", "created_at", "ended_at", "usable", "lacks"),
    *("callback_url", "callback_tries", "callback_next", "callback_at", "callback_error"),
    *(f"n:{status}" for status in STATUSES),
)
"""The fields of a task that a listing reads."""
REPORTED = ("session_id", "calls", "exit_code", "logs")
"""The fields of `RolloutState` that a node reports."""

Fields = Mapping[str, bytes]


class TaskStore:
    """What servers need. Every method may raise `StoreUnavailable`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection
        self._clock = RedisClock(connection, keys.ARRIVALS)

    async def now(self) -> float:
        return await self._clock.now()

    async def submit(self, task: Task, digest: bytes, now: float) -> tuple[TaskState, bool]:
        """The task, and whether it is new: resubmitting the same id and digest is a no-op. Raises `Conflict`."""
        blobs = (pack_versioned(task), pack_versioned(outline(task)), digest)
        rules = (task.num_samples, keys.queue_of(task), task.usable_samples or 0, task.max_attempts, task.on_lost_node)
        became = await self._run("submit", task.task_id, *blobs, repr(now), *rules, task.callback_url or "", durable=True)
        if became == b"conflict":
            raise Conflict(f"task {task.task_id} was submitted before with another body", param="task_id")
        return await self.load(task.task_id), became == b"new"

    async def holds(self, task_id: str) -> bool:
        """Whether there is such a task."""
        return bool(await self._redis.execute("EXISTS", keys.task(task_id)))

    async def load(self, task_id: str) -> TaskState:
        """Raises `NotFound`."""
        fields = parse_hash(await self._redis.execute("HGETALL", keys.task(task_id)))
        if not fields:
            raise NotFound(f"there is no task {task_id}")
        return parse_task(fields)

    async def load_rollouts(self, task_id: str) -> list[RolloutState]:
        """In the order of their indexes. Raises `NotFound`."""
        number = await self._redis.execute("HGET", keys.task(task_id), "number")
        if number is None:
            raise NotFound(f"there is no task {task_id}")
        found: list[RolloutState] = []
        for start in range(0, int(number), LOADED_AT_ONCE):
            indices = range(start, min(start + LOADED_AT_ONCE, int(number)))
            states = await asyncio.gather(*(self.load_rollout(task_id, index) for index in indices))
            found += [state for state in states if state]
        return found

    async def list_tasks(
        self,
        *,
        status: str | None,
        accepts: Callable[[TaskState], bool] | None = None,
        limit: int,
        cursor: str | None,
    ) -> tuple[list[TaskState], str | None]:
        """A page of those that `accepts`, newest first, and the cursor of the next one or None."""
        found: list[TaskState] = []
        looked_at = 0
        while looked_at < LOOKED_AT or not found:
            before = "+inf" if cursor is None else f"({cursor}"
            command = ("ZREVRANGEBYSCORE", keys.LISTING, before, "-inf", "WITHSCORES", "LIMIT", 0, LOADED_AT_ONCE)
            flat = await self._redis.execute(*command)
            states = await asyncio.gather(*(self.load_outline(task_id.decode()) for task_id in flat[::2]))
            for place, state in zip(flat[1::2], states, strict=True):
                cursor = place.decode()
                if state is not None and status in (None, state.status) and (accepts is None or accepts(state)):
                    found.append(state)
                    if len(found) == limit:
                        return found, cursor
            if len(states) < LOADED_AT_ONCE:
                return found, None
            looked_at += len(states)
        return found, cursor

    async def cancel(self, task_id: str, now: float) -> list[RolloutState]:
        """Ends every unended rollout as cancelled, at once and for good; nodes' later steps of them are refused. Returns those rollouts as
        they stood. Raises `NotFound`."""
        stood = await self._run("cancel", task_id, repr(now), durable=True)
        if stood is None:
            raise NotFound(f"there is no task {task_id}")
        pairs = zip(stood[::2], stood[1::2], strict=True)
        return [parse_rollout(task_id, int(index), parse_hash(flat)) for index, flat in pairs]

    async def watch_events(self, task_id: str, after: str = "0") -> AsyncIterator[Event]:
        """The events behind `after`, then further ones as they come, until the task ends. Raises `NotFound`."""
        key = keys.events(task_id)
        while True:
            ended = (await self._read_end(task_id)) is not None
            while entries := await self._redis.execute("XRANGE", key, f"({after}", "+", "COUNT", EVENTS_AT_ONCE):
                for entry in entries:
                    read = parse_event(entry)
                    after = read.id
                    yield read
                    ended = ended or read.kind == "task.ended"
            # The task had ended before these events were read, so none is missing.
            if ended:
                return
            await asyncio.sleep(LOOK_SECONDS)

    async def list_nodes(self) -> list[NodeState]:
        fields = parse_hash(await self._redis.execute("HGETALL", keys.NODES))
        return [unpack_checked(fields[name], NodeState) for name in sorted(fields)]

    async def count_waiting(self) -> Mapping[str, int]:
        """Waiting rollouts by what they require (`keys.queue_of`), for metrics and autoscaling."""
        counts = Counter[str]()
        for queue, waiting in (await self._load_depths()).items():
            counts[keys.merge_queue(queue)] += waiting
        return counts

    async def note_stranded(self, now: float) -> int:
        """Notes with each waiting task what no node has, and clears the note when a node has it. Returns how many notes changed."""
        nodes, depths = await asyncio.gather(self.list_nodes(), self._load_depths())
        before = {name.decode() for name in await self._redis.execute("SMEMBERS", keys.STRANDED)}
        changed = 0
        for queue in sorted({*before, *(name for name, waiting in depths.items() if waiting)}):
            lacks = find_lack(queue, nodes, now)
            if lacks or queue in before:
                changed += int(await self._run("strand", queue, lacks or "", repr(now), STRANDED_AT_ONCE))
        return changed

    async def load_totals(self) -> Mapping[str, int]:
        """Events since the store began, by name: `rollout:<status>`, `failure:<class>`, `task:<status>`, `attempts`, `retried`,
        `callback:<outcome>`, `tasks`."""
        fields = parse_hash(await self._redis.execute("HGETALL", keys.TOTALS))
        return {name: int(count) for name, count in fields.items()}

    async def claim_abandoned(self, limit: int, now: float) -> Sequence[AttemptId]:
        """Attempts of lost nodes, or cancelled before their group had begun, whose sessions are not deleted yet (`drop_abandoned`). Claims
        them for `CLAIM_SECONDS`."""
        members = await self._claim_due("abandoned", limit, now)
        return [AttemptId(task_id, int(index), int(attempt)) for task_id, index, attempt in (m.split(":") for m in members)]

    async def drop_abandoned(self, attempt: AttemptId) -> None:
        member = f"{attempt.task_id}:{attempt.index}:{attempt.attempt}"
        await self._redis.execute("ZREM", f"{keys.BASE}:abandoned", member)

    async def claim_callbacks(self, limit: int, now: float) -> Sequence[TaskState]:
        """Ended tasks whose callback is due. Claims them for `CLAIM_SECONDS`."""
        due = await self._claim_due("callbacks", limit, now)
        return [state for state in await asyncio.gather(*(self.load_outline(task_id) for task_id in due)) if state]

    async def record_callback(
        self, task_id: str, now: float, *, error: str | None = None, next_try_at: float | None = None
    ) -> None:
        """Records that the callback was delivered, or failed with `error` and is tried again at `next_try_at` (None: never)."""
        became = "delivered" if error is None else "failed" if next_try_at is not None else "given_up"
        again = "" if next_try_at is None else repr(next_try_at)
        await self._run("callback", task_id, repr(now), became, again, error or "")

    async def forget(self, ended_before: float, limit: int) -> int:
        """Deletes tasks that ended before, once their sessions are closed and their callback is settled. Returns how many."""
        return int(await self._run("forget", repr(ended_before), limit))

    async def claim_unclosed(self, limit: int, now: float) -> list[tuple[Task, RolloutState]]:
        """Rollouts ended from outside (cancelled, stopped early, failed with their node) whose sessions are not closed yet (`mark_closed`).
        Claims them for `CLAIM_SECONDS`. Tasks come without the content of their uploads."""
        found = []
        for member in await self._claim_due("closing", limit, now):
            task_id, _, index = member.partition(":")
            listed, state = await asyncio.gather(self.load_outline(task_id), self.load_rollout(task_id, int(index)))
            if listed is not None and state is not None:
                found.append((listed.task, state))
        return found

    async def mark_closed(self, task_id: str, index: int) -> None:
        await self._run("closed", task_id, index)

    async def _load_depths(self) -> Mapping[str, int]:
        flat = await self._run("depths")
        return {name.decode(): int(waiting) for name, waiting in zip(flat[::2], flat[1::2], strict=True)}

    async def _claim_due(self, what: str, limit: int, now: float) -> list[str]:
        return [member.decode() for member in await self._run("due", what, limit, repr(now), repr(now + CLAIM_SECONDS))]

    async def _read_end(self, task_id: str) -> bytes | None:
        """When it ended, None while it runs. Raises `NotFound`."""
        status, ended_at = await self._redis.execute("HMGET", keys.task(task_id), "status", "ended_at")
        if status is None:
            raise NotFound(f"there is no task {task_id}")
        return bytes(ended_at) if ended_at is not None else None

    async def load_outline(self, task_id: str) -> TaskState | None:
        """The task without the content of its uploads; None: there is none."""
        values = await self._redis.execute("HMGET", keys.task(task_id), *LISTED)
        fields = {name: value for name, value in zip(LISTED, values, strict=True) if value is not None}
        return parse_task(fields) if fields else None

    async def load_rollout(self, task_id: str, index: int) -> RolloutState | None:
        """None: there is none."""
        fields = parse_hash(await self._redis.execute("HGETALL", keys.rollout(task_id, index)))
        return parse_rollout(task_id, index, fields) if fields else None

    async def _run(self, script: str, *args: Argument, durable: bool = False) -> Any:
        return await self._redis.run(keys.read_script(script), keys.DECLARED, args, durable=durable, patient=durable)


def parse_hash(answer: Mapping[bytes, bytes] | Sequence[bytes]) -> dict[str, bytes]:
    """A hash as redis-py answers HGETALL, a mapping, or as scripts do, flat."""
    pairs = answer.items() if isinstance(answer, Mapping) else zip(answer[::2], answer[1::2], strict=True)
    return {name.decode(): value for name, value in pairs}


def parse_task(fields: Fields) -> TaskState:
    """From all fields of a task, or from those in LISTED, which lack the content of uploads. Raises `StoredValueError`."""
    counts = {status: int(fields.get(f"n:{status}", b"0")) for status in STATUSES}
    return TaskState(
        task=unpack_checked(fields.get("body") or fields["outline"], Task),
        status=fields["status"].decode(),
        created_at=float(fields["created_at"]),
        ended_at=_number(fields.get("ended_at")),
        counts=RolloutCounts({status: count for status, count in counts.items() if count}, int(fields.get("usable", b"0"))),
        callback=_parse_callback(fields),
        lacks=fields["lacks"].decode() if "lacks" in fields else None,
    )


def parse_rollout(task_id: str, index: int, fields: Fields) -> RolloutState:
    """Raises `StoredValueError`."""
    reported: dict[str, Any] = {name: msgspec.msgpack.decode(fields[f"f:{name}"]) for name in REPORTED if f"f:{name}" in fields}
    status: Any = fields["status"].decode()
    failures = [
        unpack_checked(fields[f"x:{number}"], FailureRecord) for number in range(1, int(fields.get("failed", b"0")) + 1)
    ]
    return RolloutState(
        task_id=task_id,
        index=index,
        status=status,
        attempt=int(fields["attempt"]),
        node=fields["node"].decode() if "node" in fields else None,
        verdict=unpack_checked(fields["verdict"], Verdict) if "verdict" in fields else None,
        failures=tuple(failures),
        times={name[2:]: float(value) for name, value in fields.items() if name.startswith("t:")},
        **reported,
    )


def parse_event(entry: Sequence[Any]) -> Event:
    """From an entry of XRANGE."""
    fields = parse_hash(entry[1])
    return Event(entry[0].decode(), fields["kind"].decode(), float(fields["at"]), msgspec.msgpack.decode(fields["data"]))


def _parse_callback(fields: Fields) -> Callback | None:
    if "callback_url" not in fields:
        return None
    error = fields.get("callback_error")
    return Callback(
        url=fields["callback_url"].decode(),
        tries=int(fields.get("callback_tries", b"0")),
        next_try_at=_number(fields.get("callback_next")),
        delivered_at=_number(fields.get("callback_at")),
        last_error=error.decode() if error is not None else None,
    )


def _number(value: bytes | None) -> float | None:
    return None if value is None else float(value)


def find_lack(queue: str, nodes: Sequence[NodeState], now: float) -> str | None:
    """What the rollouts of the queue (`keys.queue_of`) require and no node has, busy or not; None when a node has it
    all, or no node is alive."""
    _, kinds, cpus, memory_mb, labels = json.loads(queue)
    living = [node for node in nodes if node.seen_at > now - LIVING_SECONDS and not node.draining]
    if not living:
        return None
    able = [node for node in living if set(kinds) <= set(node.runtimes)]
    if not able:
        return f"no node has the {_join('runtime', kinds)}"
    labelled = [node for node in able if all(node.labels.get(name) == value for name, value in labels.items())]
    if not labelled:
        wanted = [f"{name}={value}" for name, value in sorted(labels.items())]
        return f"no node with the {_join('runtime', kinds)} has the {_join('label', wanted)}"
    if any(cpus <= node.cpus and memory_mb <= node.memory_mb for node in labelled):
        return None
    largest = max(labelled, key=lambda node: (min(node.cpus / cpus, node.memory_mb / memory_mb), node.name))
    return (
        f"a rollout takes {cpus:g} CPUs and {memory_mb} MB, its evaluation included; the largest node for it, {largest.name}, has "
        f"{largest.cpus:g} and {largest.memory_mb}"
    )


def _join(what: str, names: Sequence[str]) -> str:
    return f"{what}{'s' if len(names) > 1 else ''} {' and '.join(names)}"
