"""Scoring one session by one scorer: which rows are asked for, what of the answers is stored, and what stays unknown.

The rows are asked for one after the other, in the order of their ids (`proxy.scoring.plan`), and the calls of a row are stored as soon as
they are scored: whoever takes the job over goes on behind them. What an engine had cached it has not computed, so it gives no numbers for
it. Those of the beginning that a row shares with the row before it are taken from there, if the weights are the same; what is unknown still
is asked for once more, without the cache.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from proxy.dialects.base import new_call_id
from proxy.engine.apis.scores import Scored, ScoringJob
from proxy.engine.pool.placement import Placement
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import EngineCall, Replica
from proxy.errors import ContextTooLong, EngineFailed, EngineUnavailable, NotFound, RequestError
from proxy.scoring.hindsight import Hindsight
from proxy.scoring.pace import Pace
from proxy.scoring.plan import Place, ScoreRow, plan_rows
from proxy.scoring.scorers import Scorer
from proxy.scoring.vocabulary import Vocabularies
from proxy.timeline import CancelScope, Timeline
from reconstruct.details import NO_TOKEN
from reconstruct.media import Media
from reconstruct.records import RAW, Call, Forest
from reconstruct.scores import Score, unscored
from reconstruct.spans import Span

if TYPE_CHECKING:
    from proxy.scoring.metrics import ScoreMetrics
    from proxy.services import Services
    from proxy.store.states import SessionInfo


class SessionScoring:
    """`name` is the scorer's. `redo`: scores that are stored are replaced. `hints`: those of calls, by their ids."""

    def __init__(
        self,
        services: Services,
        metrics: ScoreMetrics,
        vocabularies: Vocabularies,
        pace: Pace,
        info: SessionInfo,
        name: str,
        scorer: Scorer,
        *,
        redo: bool,
        hints: Mapping[str, str],
    ) -> None:
        self._services = services
        self._metrics = metrics
        self._vocabularies = vocabularies
        self._pace = pace
        self._info = info
        self._name = name
        self._scorer = scorer
        self._redo = redo
        self._hints = hints
        self._images: dict[str, bytes] = {}

    async def run(self, forest: Forest, calls: Sequence[Call]) -> None:
        """Stores a score of each call; one that no scorer can be asked about gets the reason. Raises EngineUnavailable, EngineFailed and
        TimeoutError where it is to be tried again; NotFound once the session is gone, Conflict once a trainer has it."""
        by_policy: dict[str, list[Call]] = {}
        for call in calls:
            asked = call.policy if self._scorer.same_version else self._scorer.policy
            by_policy.setdefault(asked, []).append(call)
        for policy, asked_about in by_policy.items():
            await self._run_policy(policy, forest, asked_about)

    async def give_up(self, calls: Sequence[Call], reason: str) -> None:
        """Stores that the calls have no score, and why."""
        await self._keep({call.call_id: self._no_score(call, reason) for call in calls})

    async def _run_policy(self, policy: str, forest: Forest, calls: Sequence[Call]) -> None:
        replicas = self._serving(policy)
        window = min((each.max_model_len for each in replicas if each.max_model_len is not None), default=None)
        if self._scorer.in_hindsight:
            hindsight = Hindsight(forest, self._hints)
            for call in calls:
                await self._score_in_hindsight(policy, hindsight, forest, call, window)
            return
        fitting = [call for call in calls if await self._fits(call, forest.full_length(call.call_id), window)]
        rows = await asyncio.to_thread(plan_rows, forest, fitting)
        last: Scored | None = None
        for row in rows:
            last = await self._score_row(policy, row, last)

    async def _score_in_hindsight(
        self, policy: str, hindsight: Hindsight, forest: Forest, call: Call, window: int | None
    ) -> None:
        """A prompt with a hint begins no other call's: each call is a row of its own, stored before the next is rendered."""
        replica = self._serving(call.policy)[0]
        try:
            images = await self._load_images(forest.media(call.call_id))
            async with asyncio.timeout(self._services.settings.scoring.request_seconds):
                row = await hindsight.make_row(self._services.pool.kinds.of(replica), replica, call, images)
        except RequestError as error:
            await self._refuse([call], error, f"no score in hindsight: {error.message}")
            return
        if await self._fits(call, len(row.ids), window):
            await self._score_row(policy, row, None)

    async def _fits(self, call: Call, length: int, window: int | None) -> bool:
        """Whether so many ids fit into the scorer's window, which says so of the call if they do not."""
        # One more is sampled.
        if window is None or length < window:
            return True
        self._metrics.count_failure(self._name, "window")
        await self.give_up([call], f"{length} tokens do not fit into the scorer's window of {window}")
        return False

    async def _refuse(self, calls: Sequence[Call], error: RequestError, reason: str) -> None:
        """Raises EngineUnavailable where it is only the engine that knows no such model now."""
        if isinstance(error, NotFound):
            raise EngineUnavailable(error.message) from error
        self._metrics.count_failure(self._name, "window" if isinstance(error, ContextTooLong) else "refused", len(calls))
        await self.give_up(calls, reason)

    def _serving(self, policy: str) -> Sequence[Replica]:
        pool = self._services.pool
        try:
            found = pool.find_policy(policy)
        except NotFound as error:
            raise EngineUnavailable(error.message) from error
        if policy and found != policy:
            raise EngineUnavailable(f"no engine of the policy {policy!r} is known: scores by another one would be another's")
        return pool.serving(found)

    async def _score_row(self, policy: str, row: ScoreRow, last: Scored | None) -> Scored | None:
        """Stores the scores of the row's calls. What is known of its ids; None where the scorer refuses them."""
        try:
            await self._check_vocabulary(policy, row, row.ids)
            scored = await self._ask_row(policy, row, last)
            await self._check_vocabulary(policy, row, scored.top_ids[scored.top_ids != NO_TOKEN])
        except RequestError as error:
            await self._refuse([place.call for place in row.places], error, f"the scorer refuses it: {error.message}")
            return None
        await self._keep({place.call.call_id: self._cut_out(place, policy, scored) for place in row.places})
        self._metrics.count_tokens(self._name, sum(place.end - place.start for place in row.places))
        return scored

    async def _check_vocabulary(self, policy: str, row: ScoreRow, ids: NDArray[np.integer[Any]]) -> None:
        scorer = self._serving(policy)[0]
        kind = self._services.pool.kinds.of(scorer)
        if not kind.takes_ids:
            raise kind.no_scores(scorer)
        for sampled_by in {place.call.policy for place in row.places} - {policy}:
            await self._vocabularies.check(scorer, self._serving(sampled_by)[0], np.unique(ids).tolist())

    async def _ask_row(self, policy: str, row: ScoreRow, last: Scored | None) -> Scored:
        # What was sampled there is in the cache, but not behind a hint.
        sampled_there = not self._scorer.in_hindsight and any(place.call.policy == policy for place in row.places)
        scored = await self._ask(policy, row, len(row.ids), cached=not sampled_there)
        if last is not None and last.version == scored.version:
            scored = _join(last, scored, row.shared)
        if (missing := _find_unknown(scored, row.places)) is None:
            return scored
        return _join(await self._ask(policy, row, missing + 1, cached=False), scored, missing + 1)

    async def _ask(self, policy: str, row: ScoreRow, length: int, *, cached: bool) -> Scored:
        """Of the row's first `length` ids."""
        by_digest = await self._load_images(row.media)
        images = [by_digest[each.digest] for each in row.media]
        session_id = self._info.session_id
        scope = CancelScope(session_id, new_call_id())
        placement = Placement(self._services.pool, policy, Caller(session_id, _stay), scope, Timeline())
        media = tuple((each.start, each.length) for each in row.media)
        job = ScoringJob(scope.call_id, row.ids[:length], self._scorer.top_k, cached, media, images)
        await self._pace.wait(policy)
        started = time.perf_counter()
        async with asyncio.timeout(self._services.settings.scoring.request_seconds):
            scored = await placement.run(partial(self._ask_at, job, policy, scope))
        self._metrics.count_request(self._name, scored.computed_tokens, time.perf_counter() - started)
        return scored

    async def _ask_at(self, job: ScoringJob, policy: str, scope: CancelScope, replica: Replica) -> Scored:
        kind = self._services.pool.kinds.of(replica)
        served = replica.serve(replica.models[0] if replica.models else policy)
        asked = replace(job, served=served, reads_cache=job.reads_cache and replica.host.tells_cached)
        engines = len(self._services.pool.of(replica.policy))
        with self._pace.asking(policy, replica, engines), EngineCall(replica, scope, streams=False):
            try:
                return await kind.score(replica, asked, scope)
            except (EngineFailed, RequestError):
                if not asked.reads_cache:
                    raise
                # What was in memory in place of what was cached may be no number that JSON has: vLLM answers 400 then.
                return await kind.score(replica, replace(asked, reads_cache=False), scope)

    async def _load_images(self, media: Sequence[Media]) -> Mapping[str, bytes]:
        """By digest, at least those of `media`."""
        unknown = {each.digest for each in media} - self._images.keys()
        if unknown:
            self._images |= await self._services.media.load(unknown)
        if lost := [each.digest for each in media if each.digest not in self._images]:
            raise RequestError(f"the store has lost the image with the digest {lost[0]}")
        return self._images

    def _cut_out(self, place: Place, policy: str, scored: Scored) -> Score:
        """The score of one call's tokens."""
        start, end = place.start, place.end
        logprobs, impossible = scored.logprobs[start:end].copy(), scored.impossible[start:end]
        top_ids, top_logprobs = scored.top_ids[start:end].copy(), scored.top_logprobs[start:end].copy()
        reasons = (
            [f"{int(impossible.sum())} tokens of {place.call.call_id} have a probability of 0"] if impossible.any() else []
        )
        if self._scorer.same_version:
            others = sorted({span.version for span in place.call.node.spans} - {scored.version})
            for span in place.call.node.spans:
                if span.version != scored.version:
                    logprobs[span.start : span.end] = np.nan
                    top_logprobs[span.start : span.end] = np.nan
                    top_ids[span.start : span.end] = -1
            if others:
                gone = ", ".join(map(str, others))
                reasons.append(f"{place.call.call_id} was sampled under version {gone}, and version {scored.version} serves")
                self._metrics.count_failure(self._name, "version", 1)
        spans = (Span(scored.version, 0, end - start),)
        return Score(policy, RAW, logprobs, top_ids, top_logprobs, spans, "; ".join(reasons))

    def _no_score(self, call: Call, reason: str) -> Score:
        policy = call.policy if self._scorer.same_version else self._scorer.policy
        said = f"{call.call_id}: {reason}"
        return unscored(len(call.node.completion_ids), policy, RAW, said, self._scorer.top_k)

    async def _keep(self, scores: Mapping[str, Score]) -> None:
        await self._services.scores.keep(
            self._info.session_id, self._name, scores, created_at=self._info.created_at, replace=self._redo
        )


def _find_unknown(scored: Scored, places: Sequence[Place]) -> int | None:
    """The last sampled token of which nothing is known; None: there is none."""
    wanted = np.zeros(len(scored.logprobs), bool)
    for place in places:
        wanted[place.start : place.end] = True
    (unknown,) = np.nonzero(wanted & np.isnan(scored.logprobs) & ~scored.impossible)
    return int(unknown[-1]) if len(unknown) else None


def _join(beginning: Scored, scored: Scored, length: int) -> Scored:
    """`scored`, and where nothing is known of its first `length` ids what is known of them in `beginning`. Raises EngineFailed if the
    weights changed in between."""
    if beginning.version != scored.version:
        raise EngineFailed(f"the weights changed from version {scored.version} to {beginning.version} while a row was scored")
    unknown = np.isnan(scored.logprobs[:length]) & ~scored.impossible[:length]
    arrays = []
    for name in ("logprobs", "top_ids", "top_logprobs", "impossible"):
        own = getattr(scored, name).copy()
        own[:length][unknown] = getattr(beginning, name)[:length][unknown]
        arrays.append(own)
    return replace(scored, **dict(zip(("logprobs", "top_ids", "top_logprobs", "impossible"), arrays, strict=True)))


async def _stay() -> None:
    """It is wanted for as long as its task runs."""
