"""Scoring: the jobs of one process, and what a session that is closed still waits for.

A closed session that names scorers does not join its group before each of its calls has a score of each of them, or the reason why it has
none: `hold_back` puts the jobs into the store, before anything else lets go of the session, and whoever does the last of them fills the
group. A job is taken for a while and kept by renewing that, so what a dead process took is taken again. Doing a job twice stores nothing
twice: a call that has a score keeps it.

A job that fails is tried again, less and less often, until `timeout_seconds` have passed since its first try, or since a call was last
scored. Then the calls that are left get the reason in place of a score, which is the end of it: a session that requires the scorer is not
usable in its group, another one is delivered with that reason. `POST /sessions/{id}/scores` tries again. The same holds for what breaks by
a fault of this service, and for a job that MOST_LOST processes in a row neither settled nor put off; where not even the rows can be built,
the reason is kept as a verdict, and the group gets the session without rows.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol

from contract.attempts import ENDED
from proxy import rows
from proxy.errors import Conflict, EngineFailed, EngineUnavailable, NotFound, StoreUnavailable, VerbatimError
from proxy.scoring.judges import judge_session
from proxy.scoring.metrics import ScoreMetrics
from proxy.scoring.pace import Pace
from proxy.scoring.plan import find_wanted
from proxy.scoring.scorers import Scorer, TurnJudge, select
from proxy.scoring.vocabulary import Vocabularies
from proxy.scoring.work import SessionScoring
from proxy.store.keys import StoredValueError
from proxy.store.score_jobs import ScoreJob, ScoreJobStore, TakenJob
from proxy.store.states import SessionInfo, SessionState, Verdicts, list_hints
from reconstruct.accounting import Settled
from reconstruct.errors import ReconstructError
from reconstruct.records import Call
from reconstruct.scores import Scores

if TYPE_CHECKING:
    from proxy.services import Services

log = logging.getLogger(__name__)

TAKEN_SECONDS = 15.0
"""How long a job is taken for: that long it lies when its process dies. It is renewed three times in that time."""
MOST_LOST = 5
"""So many processes may vanish with a job before the job counts as their end: its session may be too large for them."""
LOOK_SECONDS = 2.0
"""How often a process that has nothing to score looks for jobs of other processes."""
LOOK_UNSET_SECONDS = 30.0
"""The same where no scorer is set: only what sessions named before is left, to be given up."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 60.0
"""Seconds before a job that failed is tried again: they double."""

ENGINE = (EngineUnavailable, EngineFailed)

UNKNOWN = Scorer()
"""Stands for a scorer that a session names and the settings do not have any more."""


class Fill(Protocol):
    """Puts a closed session into its group, if nothing holds it back; a `broken` one without rows."""

    async def __call__(self, services: Services, state: SessionState, *, broken: bool = False) -> str: ...


class Scoring:
    def __init__(self, services: Services, jobs: ScoreJobStore, fill: Fill) -> None:
        self._services = services
        self._scorers = select(services.settings.scorers, Scorer)
        self._judges = select(services.settings.scorers, TurnJudge)
        self._jobs = jobs
        self._fill = fill
        self._metrics = ScoreMetrics(services.metrics.registry)
        self._vocabularies = Vocabularies(services.pool.kinds)
        self._pace = Pace(services.settings.scoring.share)
        self._woken = asyncio.Event()

    async def ask(self, info: SessionInfo, name: str, *, again: bool = False) -> None:
        """Have the session scored; `again`: also the calls that could not be before. Returns once that is sure to happen."""
        await self._jobs.add(ScoreJob(info.session_id, info.created_at, name, again))
        self._woken.set()

    async def find_queued(self, state: SessionState, names: Iterable[str]) -> set[str]:
        """Those of the scorers and judges whose job for the session is not done, or comes after a judge's that is not."""
        queued = await self._jobs.find_queued(state.info.session_id, names)
        waiting = {name for name in state.info.scores if self._awaits_judges(state, name)}
        return queued | waiting if queued & self._judges.keys() else queued

    async def hold_back(self, state: SessionState, settled: Settled, scores: Mapping[str, Scores]) -> bool:
        """Whether the closed session's group waits for scores; then jobs for them are stored."""
        missing = [name for name in state.info.scores if self._find_missing(state, settled, scores, name)]
        for name in missing:
            # Whoever finishes its judges comes back here.
            if not self._awaits_judges(state, name):
                await self.ask(state.info, name)
        return bool(missing)

    def find_failed(self, state: SessionState, settled: Settled, scores: Mapping[str, Scores]) -> str:
        """Why the session, which `hold_back` does not hold back, has not all scores that are required; "" if it has."""
        for name in state.info.scores:
            judge, verdicts = self._judges.get(name), state.verdicts.get(name)
            if not (judge or self._scorers.get(name, UNKNOWN)).required:
                continue
            if verdicts is not None and verdicts.error:
                return f"not {'scored' if judge is None else 'judged'} by {name}: {verdicts.error}"
            given = [scores.get(call.call_id, {}).get(name) for call in find_wanted(settled, self._scorers.get(name))]
            if errors := [score.error for score in given if score is not None and score.error]:
                return f"not scored by {name}: {errors[0]}"
        return ""

    def _find_missing(
        self, state: SessionState, settled: Settled, scores: Mapping[str, Scores], name: str, *, again: bool = False
    ) -> list[Call]:
        """The calls that a scorer or judge is asked about and has said nothing of; `again`: or could say nothing of."""
        wanted, verdicts = find_wanted(settled, self._scorers.get(name)), state.verdicts.get(name)
        if name in self._judges:
            return wanted if verdicts is None or (again and verdicts.error) else []
        if verdicts is not None and verdicts.error:
            return wanted if again else []
        if self._is_in_hindsight(name) and not self._awaits_judges(state, name):
            hints = list_hints(state.verdicts)
            wanted = [call for call in wanted if call.call_id in hints]
        own = {call.call_id: scores.get(call.call_id, {}).get(name) for call in wanted}
        return [call for call in wanted if (score := own[call.call_id]) is None or (again and score.error)]

    def _is_in_hindsight(self, name: str) -> bool:
        return name in self._scorers and self._scorers[name].in_hindsight

    def _awaits_judges(self, state: SessionState, name: str) -> bool:
        """Whether the scorer needs hints that the session's judges have not given yet."""
        judges = [judge for judge in state.info.scores if judge in self._judges]
        return self._is_in_hindsight(name) and any(judge not in state.verdicts for judge in judges)

    # The jobs of this process

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Inside, jobs are done, `at_once` of them at a time."""
        limits = self._services.settings.scoring
        workers = [asyncio.create_task(self._work()) for _ in range(limits.at_once if self._services.settings.scorers else 1)]
        try:
            yield
        finally:
            for worker in workers:
                worker.cancel()
            await asyncio.gather(*workers, return_exceptions=True)

    async def _work(self) -> None:
        while True:
            taken = None
            # Before it looks: what is added from here on wakes it.
            self._woken.clear()
            try:
                taken = await self._jobs.take(TAKEN_SECONDS)
                # While there is always another one to take, too: then the queue is long.
                self._metrics.show_queue(await self._jobs.count())
                if taken is not None:
                    await self._keep_while(taken)
            except (StoreUnavailable, StoredValueError) as error:
                log.warning("scoring is postponed: %s", error)
                await asyncio.sleep(LOOK_SECONDS)
                if taken is not None:
                    # Nobody vanished with it.
                    with contextlib.suppress(StoreUnavailable):
                        await self._jobs.put_off(taken, TAKEN_SECONDS)
            except Exception:
                log.exception("a scored session is finished later")
            if taken is None:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_SECONDS if self._services.settings.scorers else LOOK_UNSET_SECONDS):
                        await self._woken.wait()

    async def _keep_while(self, taken: TakenJob) -> None:
        """Do the job, and end when another process has taken it, which it does if this one's renewals do not arrive."""
        doing = asyncio.create_task(self._do(taken))
        try:
            while not (await asyncio.wait({doing}, timeout=TAKEN_SECONDS / 3))[0]:
                if not await self._jobs.keep(taken, TAKEN_SECONDS):
                    return
            await doing
        except asyncio.CancelledError:
            # The process stops: another one goes on at once.
            with contextlib.suppress(StoreUnavailable):
                await self._jobs.put_off(taken, 0.0)
            raise
        finally:
            doing.cancel()
            await asyncio.gather(doing, return_exceptions=True)

    async def _do(self, taken: TakenJob) -> None:
        job = taken.job
        state = await self._services.sessions.load(job.session_id)
        if state is None or state.info.created_at != job.created_at:
            await self._jobs.settle(taken)
            return
        if taken.lost >= MOST_LOST:
            await self._give_up(taken, f"none of {taken.lost} tries in a row came to an end")
            return
        try:
            try:
                await self._score(job, state)
            except (NotFound, Conflict, ReconstructError) as error:
                # It is deleted, a trainer has its rows, which stay as they are, or it has none.
                log.warning("session %s: not scored by %s: %s", job.session_id, job.scorer, error)
            await self._finish(taken)
        except StoreUnavailable:
            # The job is taken again.
            raise
        except Exception as error:
            self._tell_failure(job, error)
            if taken.age < self._services.settings.scoring.timeout_seconds:
                now = await self._services.sessions.load(job.session_id)
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(taken.number, 10))
                await self._jobs.put_off(taken, pause, got_on=now is not None and now.scored > state.scored)
            else:
                limit = self._services.settings.scoring.timeout_seconds
                await self._give_up(taken, f"not scored within {limit:g} s: {_describe(error)}")

    async def _score(self, job: ScoreJob, state: SessionState) -> None:
        """Raises what an engine, a judge or the store raises."""
        built = await rows.session_rows(self._services, state)
        calls = self._find_missing(state, built.settled, built.scores, job.scorer, again=job.again)
        if not calls:
            return
        if (judge := self._judges.get(job.scorer)) is not None:
            verdicts = await judge_session(self._services, judge, state, built.settled.forest, calls)
            await self._services.sessions.note_verdicts(job.session_id, job.created_at, job.scorer, verdicts)
        elif self._awaits_judges(state, job.scorer):
            raise EngineUnavailable("the session's judges have not given their hints yet")
        elif job.scorer not in self._scorers:
            raise EngineUnavailable(f"there is no scorer {job.scorer!r} in VERBATIM_SCORERS")
        else:
            await self._work_on(job, state).run(built.settled.forest, calls)
            if job.scorer in state.verdicts:
                await self._note(job, "")

    def _work_on(self, job: ScoreJob, state: SessionState) -> SessionScoring:
        scorer = self._scorers.get(job.scorer, UNKNOWN)
        return SessionScoring(
            self._services,
            self._metrics,
            self._vocabularies,
            self._pace,
            state.info,
            job.scorer,
            scorer,
            redo=job.again,
            hints=list_hints(state.verdicts),
        )

    def _tell_failure(self, job: ScoreJob, error: Exception) -> None:
        reason = "timeout" if isinstance(error, TimeoutError) else "engine" if isinstance(error, ENGINE) else "fault"
        self._metrics.count_failure(job.scorer, reason)
        fault = error if reason == "fault" else None
        log.warning("session %s: not scored by %s yet: %s", job.session_id, job.scorer, _describe(error), exc_info=fault)

    async def _give_up(self, taken: TakenJob, reason: str) -> None:
        """Stores why the calls that are left have nothing, for good; of the whole session, without rows, where even that vanished."""
        job = taken.job
        log.error("session %s: given up by %s: %s", job.session_id, job.scorer, reason)
        if taken.lost > MOST_LOST:
            self._metrics.count_failure(job.scorer, "gave_up")
            await self._note(job, reason)
            await self._finish(taken, broken=True)
            return
        try:
            state = await _load(self._services, job)
            built = await rows.session_rows(self._services, state)
            left = self._find_missing(state, built.settled, built.scores, job.scorer)
            self._metrics.count_failure(job.scorer, "gave_up", len(left))
            if job.scorer in self._judges:
                await self._note(job, reason)
            else:
                await self._work_on(job, state).give_up(left, reason)
        except (NotFound, Conflict) as gone:
            log.warning("session %s: not scored by %s: %s", job.session_id, job.scorer, gone)
        except StoreUnavailable:
            raise
        except Exception:
            log.exception("session %s: the reason is kept for the whole of it", job.session_id)
            self._metrics.count_failure(job.scorer, "gave_up")
            await self._note(job, reason)
        await self._finish(taken, at_last=True)

    async def _note(self, job: ScoreJob, reason: str) -> None:
        with contextlib.suppress(NotFound, Conflict):
            await self._services.sessions.note_verdicts(job.session_id, job.created_at, job.scorer, Verdicts({}, {}, reason))

    async def _finish(self, taken: TakenJob, *, at_last: bool = False, broken: bool = False) -> None:
        """The session goes on to its group before the job is forgotten: whoever dies in between leaves a job that finds nothing to do.
        `at_last`: it goes there without rows if they cannot be built; `broken`: without."""
        state = await self._services.sessions.load(taken.job.session_id)
        if state is not None and state.status in ENDED and taken.job.scorer in state.info.scores:
            try:
                await self._fill(self._services, state, broken=broken)
            except StoreUnavailable:
                raise
            except VerbatimError as error:
                log.warning("session %s was scored and did not join its group: %s", taken.job.session_id, error.message)
            except Exception:
                if not at_last:
                    raise
                log.exception("session %s joins its group without rows", taken.job.session_id)
                await self._fill(self._services, state, broken=True)
        await self._jobs.settle(taken)


def _describe(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "no answer in time"
    return error.message if isinstance(error, VerbatimError) else f"{type(error).__name__}: {error}"


async def _load(services: Services, job: ScoreJob) -> SessionState:
    """Raises NotFound if the session is gone."""
    state = await services.sessions.load(job.session_id)
    if state is None or state.info.created_at != job.created_at:
        raise NotFound(f"session {job.session_id} was deleted before it was scored")
    return state
