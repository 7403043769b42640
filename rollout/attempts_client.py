"""The service's attempts, for one node: take rollouts, keep them, report, finish and release them, and read what their sessions have.

Each method is one request, which may be repeated, and raises `ServiceError`; those that name an attempt raise `Superseded` once the node no
longer has it.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar
from urllib.parse import quote

import httpx
import msgpack
from pydantic import TypeAdapter

from contract.attempts import (
    NODE_HEADER,
    NODE_KEY_HEADER,
    AttemptId,
    FailureRecord,
    NodeState,
    RolloutState,
    Room,
    Status,
    Superseded,
    TakenRollout,
    Verdict,
)
from contract.client import ONCE, AsyncServiceClient
from contract.errors import ResourceConflict, ServiceError, ServiceUnavailable
from contract.tasks import Task
from reconstruct.roles import RoleRule, encode_rule

ACCEPT = "application/msgpack;arrays=packed"
ARRAYS = ("prompt_ids", "completion_ids", "logprobs", "logprob_modes", "weight_versions")
PAGE = 200
T = TypeVar("T")
LOG_CHARACTERS = 65_536


@dataclass(frozen=True, slots=True)
class OpenSession:
    """`base_urls` are by the kind of client: openai, anthropic, gemini, and those of dialects that packages add."""

    session_id: str
    api_key: str = field(repr=False)
    base_urls: Mapping[str, str]


class AttemptsClient:
    """`http` is a client with the node's token. The name `node` belongs to the `key`, whichever node has it."""

    def __init__(self, http: AsyncServiceClient, node: str, key: str) -> None:
        self._http = http
        self.node = node
        self._headers = {NODE_HEADER: quote(node, safe=""), NODE_KEY_HEADER: key}

    async def take(self, room: Room, lease_seconds: float, token: str, wait_seconds: float) -> TakenRollout | None:
        """A rollout that the node has room for, after `wait_seconds` at the latest; None when there is none. Repeated with the `token`, it
        gives the one that an earlier answer had."""
        wanted = {**asdict(room), "runtimes": sorted(room.runtimes)}
        body = {"token": token, "room": wanted, "lease_seconds": lease_seconds, "wait_seconds": wait_seconds}
        answer = await self._send("POST", "/attempts/take", body=body, answer_seconds=wait_seconds, retry=ONCE)
        if answer.status_code == 204:
            return None
        found = msgpack.unpackb(answer.content, strict_map_key=False)
        attempt = AttemptId(**found["attempt"])
        task = found["task"]
        if task is None:
            task = msgpack.unpackb((await self._ask("GET", attempt, "task")).content, strict_map_key=False)
        return TakenRollout(attempt, _read(Task, task), _read(RolloutState, found["state"]), found["resumed"])

    async def extend(self, state: NodeState, held: Sequence[AttemptId]) -> tuple[list[AttemptId], float]:
        """Renews the leases: those of `held` that the node no longer has, and the time by the clock of leases."""
        body = {"state": asdict(state), "held": [asdict(attempt) for attempt in held]}
        # The next beat comes soon, with what is so then.
        answer = (await self._send("POST", "/attempts/extend", body=body, retry=ONCE)).json()
        return [AttemptId(**lost) for lost in answer["lost"]], answer["now"]

    async def leave(self) -> None:
        """The node has ended and holds nothing."""
        await self._send("POST", "/attempts/leave", retry=ONCE)

    async def report(self, attempt: AttemptId, status: Status, **fields: Any) -> None:
        """The attempt reached `status`, which is not `running`."""
        await self._ask("POST", attempt, "report", {"status": status, **fields})

    async def open(self, attempt: AttemptId, roles: Sequence[RoleRule], logs: str) -> OpenSession:
        """The attempt runs: its session. Raises `HeldBack` while no new group may begin. Repeated, it gives another key."""
        body = {"status": "running", "logs": logs, "harness_roles": [encode_rule(rule) for rule in roles]}
        return _read_opened(await self._ask("POST", attempt, "report", body))

    async def finish(self, attempt: AttemptId, verdict: Verdict) -> None:
        """Raises `RequestRefused`, nothing done, for a reward that is refused."""
        await self._ask("POST", attempt, "finish", {"verdict": asdict(verdict)})

    async def put_back(self, attempt: AttemptId) -> None:
        """The harness had not started: queued again, without using up an attempt."""
        await self._release(attempt, "put_back")

    async def give_way(self, attempt: AttemptId) -> bool:
        """Whether another rollout waits for the place, so that this one is queued again, without using up an attempt."""
        return await self._release(attempt, "give_way")

    async def give_up(self, attempt: AttemptId, failure: FailureRecord, *, spared: bool = False, stopped: bool = False) -> bool:
        """Whether the failed attempt is followed by another. `spared`: it does not count. `stopped`: the node ends."""
        return await self._release(attempt, "stopped" if stopped else "failed", failure=asdict(failure), spared=spared)

    async def store_log(self, attempt: AttemptId, text: str) -> None:
        """Store the end of the agent's output with its session."""
        await self._ask("PUT", attempt, "log", {"text": text[-LOG_CHARACTERS:]})

    async def load_session(self, attempt: AttemptId) -> dict[str, Any]:
        """As `GET /sessions/{id}`."""
        found: dict[str, Any] = (await self._ask("GET", attempt, "session")).json()
        return found

    async def list_calls(self, attempt: AttemptId) -> list[dict[str, Any]]:
        """The session's calls in order, without their token arrays."""
        found: list[dict[str, Any]] = []
        cursor: str | None = None
        while True:
            params = {"limit": PAGE, **({"cursor": cursor} if cursor else {})}
            page = msgpack.unpackb((await self._ask("GET", attempt, "calls", params=params)).content, strict_map_key=False)
            found += [{name: value for name, value in call.items() if name not in ARRAYS} for call in page["calls"]]
            cursor = page["cursor"]
            if cursor is None:
                return found

    async def open_judge(self, attempt: AttemptId) -> OpenSession:
        """A session for the model that judges the run."""
        return _read_opened(await self._ask("POST", attempt, "judges"))

    async def close_judge(self, attempt: AttemptId, opened: OpenSession) -> None:
        part = f"judges/{quote(opened.session_id, safe='')}/close"
        await self._ask("POST", attempt, part)

    async def repeat(self, send: Callable[[], Awaitable[T]]) -> T:
        """What `send` gives, which is made again as long as the service's own requests are."""
        return await self._http.repeat(send)

    async def check_ready(self) -> None:
        """Raises `ServiceUnavailable` while the service lacks its store or an engine."""
        try:
            await self._http.request("GET", "/readyz")
        except ServiceUnavailable:
            raise
        except ServiceError:
            # A gateway may hide that page from nodes.
            pass

    async def _release(self, attempt: AttemptId, why: str, **fields: Any) -> bool:
        return bool((await self._ask("POST", attempt, "release", {"why": why, **fields})).json()["queued"])

    async def _ask(self, method: str, attempt: AttemptId, part: str, body: Any = None, params: Any = None) -> httpx.Response:
        path = f"/attempts/{quote(attempt.task_id, safe='')}/{attempt.index}/{attempt.attempt}/{part}"
        with _fenced(attempt):
            return await self._send(method, path, body=body, params=params, accept=ACCEPT)

    async def _send(self, method: str, path: str, **request: Any) -> httpx.Response:
        return await self._http.request(method, path, headers=self._headers, **request)


@contextmanager
def _fenced(attempt: AttemptId) -> Iterator[None]:
    try:
        yield
    except ResourceConflict as error:
        if error.code == "superseded":
            raise Superseded(error.reason) from error
        raise


def _read_opened(answer: httpx.Response) -> OpenSession:
    opened = answer.json()
    return OpenSession(opened["session_id"], opened["api_key"], opened["base_urls"])


def _read(kind: type, given: Any) -> Any:
    """As the service stores it. A field that it lacks has its default."""
    return _READERS[kind].validate_python(given, strict=False, extra="ignore", by_alias=False, by_name=True)


_READERS: Mapping[type, TypeAdapter[Any]] = {kind: TypeAdapter(kind) for kind in (Task, RolloutState)}
