"""What is still to be scored, in Redis: one job per session and scorer, in the slot of `{scores}`.

A job is put there at least once, before whatever else would remember the session lets go of it; it is taken by any process for a while,
and stays until whoever took it settles it. So a process that dies loses none, and one that was only slow settles nothing that another has
taken since: each taking has a number of its own. A job that is asked for again while it is worked at is due again afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from proxy.store import keys
from proxy.store.connection import Argument, Script, StoreConnection
from proxy.store.keys import pack_versioned, unpack_versioned

_KEYS = (keys.SCORES_DUE, keys.SCORES_JOBS, keys.SCORES_TAKEN, keys.SCORES_ASKED)


@dataclass(frozen=True, slots=True)
class ScoreJob:
    """The session created at `created_at` is to be scored by a scorer. `again`: also the calls that could not be scored before."""

    session_id: str
    created_at: float
    scorer: str
    again: bool = False

    @property
    def name(self) -> str:
        return f"{self.scorer}={self.session_id}"


@dataclass(frozen=True, slots=True)
class TakenJob:
    """A job that was taken, for the `number`-th time, after it was asked for `asked` times, and was first taken `age` seconds ago, or first
    since it last got on. `lost`: how many times in a row whoever had taken it neither put it off nor settled it."""

    job: ScoreJob
    number: int
    asked: int
    age: float
    lost: int


class ScoreJobStore:
    """Every method may raise `StoreUnavailable`."""

    def __init__(self, connection: StoreConnection) -> None:
        self._redis = connection

    async def add(self, job: ScoreJob) -> None:
        """Due at once. One that is there already stays as old as it is."""
        await self._run("add_score_job", job.name, pack_versioned(job), int(job.again), durable=True)

    async def take(self, seconds: float) -> TakenJob | None:
        """The job that is due for longest, for so many seconds; None: none is due."""
        answer = await self._run("take_score_job", repr(seconds))
        if not answer:
            return None
        packed, number, asked, age, lost = answer
        return TakenJob(unpack_versioned(packed, ScoreJob), int(number), int(asked), float(age), int(lost))

    async def keep(self, taken: TakenJob, seconds: float) -> bool:
        """It is worked at for so many seconds more. False: another process has taken it since."""
        return bool(await self._run("keep_score_job", taken.job.name, taken.number, repr(seconds), 0, 0))

    async def put_off(self, taken: TakenJob, seconds: float, *, got_on: bool = False) -> bool:
        """It is left alone that long. `got_on`: its age is counted anew. False: another process has taken it since."""
        return bool(await self._run("keep_score_job", taken.job.name, taken.number, repr(seconds), 1, int(got_on)))

    async def settle(self, taken: TakenJob) -> bool:
        """It is done, unless it was asked for again meanwhile: then it is due again. False: another process has taken it since."""
        return bool(await self._run("settle_score_job", taken.job.name, taken.number, taken.asked, durable=True))

    async def count(self) -> int:
        """Jobs that are waiting or worked at."""
        return int(await self._redis.execute("ZCARD", keys.SCORES_DUE))

    async def find_queued(self, session_id: str, scorers: Iterable[str]) -> set[str]:
        """The scorers whose job for the session is not done."""
        names = sorted(scorers)
        found = (
            await self._redis.execute("HMGET", keys.SCORES_JOBS, *(f"{each}={session_id}" for each in names)) if names else []
        )
        return {name for name, packed in zip(names, found, strict=True) if packed is not None}

    async def _run(self, script: str, *args: Argument, **how: bool) -> Any:
        return await self._redis.run(Script.read(script), _KEYS, args, **how)
