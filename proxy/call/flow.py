"""The path of one call: one function for all dialects, streamed or not.

`Flow.call` reads like the steps: admit, plan the prompt and write the intent, sample, commit; it yields deltas as text becomes
certain and ends with the reply, which is yielded only once its record is in the store. What the harness must not see before the
commit (the reply's end) it does not, and what the engine must not see before the intent is written (the request's end) neither.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from proxy.call.budget import check_budget, fit_budget
from proxy.call.inflight import Running
from proxy.call.plan import Continuation, TokenPlan, confirm, continuation, place, plan_tokens, remember
from proxy.call.prompts import plan_prompt, prompt_continuation
from proxy.call.record import call_records, minted_choice, minted_delta, prompt_of
from proxy.call.tree import Draft, SessionTree
from proxy.call.turn import Turn, fit_window, refuse_media
from proxy.dialects.base import Delta, FirstToken, Reply, Request, Sampling, new_call_id
from proxy.engine.apis.base import EngineKind, EngineKinds, Job, Outcome, check_sampled
from proxy.engine.apis.details import Wanted
from proxy.engine.apis.renderer import Rendered
from proxy.engine.pool.routing import Caller
from proxy.engine.replica import Replica
from proxy.engine.wire.http import Line, Withheld
from proxy.errors import (
    Conflict,
    EngineFailed,
    EngineUnavailable,
    NotFound,
    SessionFull,
    StoreUnavailable,
    Unavailable,
    VerbatimError,
)
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.sessions import Intent
from proxy.timeline import CLOCK, COMMIT, ENGINE, INTENT, PLAN, QUEUE, REPLY, SAMPLE, STORE, CallClock, Waiting, Within
from reconstruct.bridge import Rendering
from reconstruct.codec import encode
from reconstruct.messages import hash_bytes
from reconstruct.records import UNKNOWN_MODE, Call

T = TypeVar("T")

_CUT = "the call was cut before it was sampled"

_LONG_BYTES = 2**20
"""Records of more than this take a while to be compressed."""

_ABORT_PATIENCE_SECONDS = 0.5
_ABORT_SECONDS = 5.0
"""How long an engine may take to end a call that it is asked to end, before it is hung up on: less than a close waits."""


class Flow:
    def __init__(self, services: Services) -> None:
        self._services = services
        self._rules = services.settings.role_rules
        self._kinds = services.pool.kinds
        self._planner = Planner(self._kinds, retain_thinking=services.settings.thinking == "retain")

    def admit(self, draft: Draft, request: Request, body: bytes, headers: Mapping[str, str]) -> Turn:
        """The call enters: from here on closing the session or the service ends it properly. `leave` must follow."""
        call_ids = [new_call_id() for _ in range(request.n)]
        info = draft.tree.info
        running = Running(info.session_id, call_ids[0])
        times = CLOCK.get() or CallClock()
        now, clock = time.time(), time.perf_counter()
        turn = Turn(draft, request, hash_bytes(body), call_ids, running, now, clock, times, headers, self._rules)
        turn.sampling = {**request.sampling, **overrides(info.sampling)}
        retry = headers.get("x-stainless-retry-count", "0")
        turn.marks = {**request.marks, "retry": retry} if retry != "0" else request.marks
        self._services.inflight.enter(running)
        return turn

    def leave(self, turn: Turn) -> None:
        self._services.inflight.leave(turn.running)

    async def call(self, turn: Turn) -> AsyncIterator[Sampling | FirstToken | Delta | Reply]:
        """Yields Sampling, FirstToken and deltas where it is streamed, then the recorded reply. Raises VerbatimError; then nothing is
        half recorded, and nothing was answered unless FirstToken came."""
        outcome = None
        async for piece in self._reached(turn):
            if isinstance(piece, Outcome):
                outcome = piece
            elif isinstance(piece, Delta):
                for part in minted_delta(piece, turn.call_ids).split():
                    yield part
            else:
                yield piece
        if outcome is None:
            raise EngineFailed("the engine ended without a reply")
        reply = await self._commit(turn, outcome)
        if outcome.broken is not None:
            # What was sampled is recorded; the harness must not take it for a whole reply.
            raise EngineFailed(outcome.broken)
        yield reply

    async def _reached(self, turn: Turn) -> AsyncIterator[Sampling | FirstToken | Delta | Outcome]:
        """What the first replica that can be reached samples. Another one is tried only where nothing was sampled yet."""
        caller = Caller(turn.session_id, turn.running.cut, lambda: self._check_open(turn))
        async with self._services.pool.route(turn.request.model, caller) as route:
            while True:
                turn.times.begin(QUEUE)
                with Waiting(ENGINE):
                    replica = await self._unless_cut(turn, route.next())
                turn.go_to(replica)
                fit_budget(turn)
                answered = False
                self._planner.find(turn)
                intent = WritingIntent(self._services, self._planner, turn)
                try:
                    await self._plan(turn, intent)
                    if turn.request.stream:
                        yield Sampling()
                    async for piece in self._sample(turn, intent):
                        answered = True
                        yield piece
                    return
                except EngineUnavailable:
                    if answered or turn.running.cut.is_set() or not route.try_another():
                        raise
                finally:
                    intent.give_up()

    async def _plan(self, turn: Turn, intent: WritingIntent) -> None:
        """Plan the prompt, and wait for the intent where there is something to plan. Raises as they do; then no intent is left."""
        if not self._planner.plans(turn):
            return
        try:
            planned_for = await self._unless_cut(turn, self._planner.plan(turn))
            turn.times.begin(INTENT)
            with Waiting(STORE):
                await intent.written()
            if turn.found is not planned_for:
                turn.times.begin(PLAN)
                await self._unless_cut(turn, self._planner.plan(turn))
        except VerbatimError:
            await intent.take_back()
            raise

    async def _unless_cut(self, turn: Turn, work: Coroutine[Any, Any, T]) -> T:
        """What `work` gives, which is broken off when the call is cut meanwhile. Raises EngineFailed then."""
        line = Line()

        async def hang_up() -> None:
            line.hang_up()

        if turn.running.cut.is_set():
            work.close()
            raise EngineFailed(_CUT)
        turn.running.ask_engine = hang_up
        try:
            return await work
        except asyncio.CancelledError:
            if not line.hung_up:
                raise
            line.absorb()
            raise EngineFailed(_CUT) from None
        finally:
            turn.running.ask_engine = None

    async def _check_open(self, turn: Turn) -> None:
        """Raises Conflict when the session was closed, by whichever process, and NotFound when it was deleted."""
        with contextlib.suppress(StoreUnavailable):
            state = await self._services.sessions.load(turn.session_id)
            if state is None or state.info.created_at != turn.tree.info.created_at:
                raise NotFound(f"session '{turn.session_id}' does not exist")
            if state.status != "open":
                raise Conflict(f"session '{turn.session_id}' is {state.status}; it takes no more calls")

    async def count(self, tree: SessionTree, request: Request) -> int:
        """How many tokens the request's prompt has, as the engine counts them; nothing is recorded."""
        replica = self._services.pool.pick(tree.info.session_id, request.model)
        return await self._kinds.of(replica).count(replica, request)

    async def _sample(self, turn: Turn, intent: WritingIntent) -> AsyncIterator[FirstToken | Delta | Outcome]:
        """Let the engine sample; a call that it refused or lost before its first token leaves the tree as it was."""
        assert turn.replica is not None
        turn.times.begin(SAMPLE)
        engine = self._kinds.of(turn.replica)
        job = Job(turn.call_ids[0], turn.request, turn.sampling, Line(), wanted=wanted_of(turn, self._services.settings))
        job.id_text = self._kinds.id_text(turn.session_id)
        if turn.plan is not None:
            job.prompt_ids, job.body = turn.plan.prompt_ids, turn.plan.body
        if not intent.is_written:
            job.line.before = partial(self._written, turn, intent, job.line)
        turn.running.ask_engine = partial(self._end, turn, engine, job)
        # As soon as the engine was asked, since the record is to have it.
        asyncio.get_running_loop().call_soon(lambda: turn.purpose)
        clock = time.perf_counter()
        try:
            if turn.running.cut.is_set():
                raise EngineFailed(_CUT)
            async for piece in engine.sample(turn.replica, job, stream=turn.request.stream):
                if isinstance(piece, Outcome):
                    check_sampled(piece, logprob_mode(turn.replica, self._services.settings))
                yield piece
        except asyncio.CancelledError:
            # Hung up on while the engine was asked something else than to sample.
            if not job.line.hung_up:
                raise
            raise job.line.absorb() from None
        except Withheld as withheld:
            job.line.detach()
            await intent.take_back()
            raise withheld.error from None
        except VerbatimError:
            job.line.detach()
            if not job.line.hung_up or job.line.before is not None:
                await intent.take_back()
            raise
        finally:
            turn.engine_seconds += time.perf_counter() - clock
            turn.sampling = job.sampling

    async def _written(self, turn: Turn, intent: WritingIntent, line: Line) -> None:
        """Returns when the engine may have the request's end. Raises Withheld."""
        clock = time.perf_counter()
        try:
            with Within(INTENT), Waiting(STORE):
                await intent.written()
        except VerbatimError as error:
            raise Withheld(error) from error
        finally:
            turn.engine_seconds -= time.perf_counter() - clock
        line.before = None

    async def _end(self, turn: Turn, engine: EngineKind, job: Job) -> None:
        """End the sampling now: ask the engine, which then answers with what it has, or hang up where it cannot be asked or does not
        have the request yet."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                if job.line.before is None and await self._asked_to_end(turn, engine, job):
                    return
        except TimeoutError:
            # An engine that hangs would keep the call, and whoever closes its session.
            pass
        job.line.hang_up()

    async def _asked_to_end(self, turn: Turn, engine: EngineKind, job: Job) -> bool:
        """Whether the call ended after the engine was told to end it; False when the engine cannot be told."""
        assert turn.replica is not None
        while await engine.abort(turn.replica, job):
            try:
                # Asked before the engine knew of the request, it would not have stopped: ask again.
                async with asyncio.timeout(_ABORT_PATIENCE_SECONDS):
                    await turn.running.done.wait()
            except TimeoutError:
                continue
            return True
        return False

    async def _commit(self, turn: Turn, outcome: Outcome) -> Reply:
        """Record every choice in one step, then let the tree and the reply know them."""
        assert turn.found is not None and turn.replica is not None
        turn.times.begin(COMMIT)
        spoken = any(sampled.token_ids or sampled.message.get("content") for sampled in outcome.choices)
        if turn.running.cut.is_set() and not spoken:
            await self._services.sessions.drop_intent(turn.session_id, turn.call_ids[0])
            raise EngineFailed("the call was cut before a token was sampled")
        forced = isinstance(turn.request.forward.get("tool_choice"), dict)
        choices = [minted_choice(sampled, turn.call_ids, forced_tool=forced) for sampled in outcome.choices]
        frozen = self._services.pool.is_frozen(turn.replica, turn.request.model)
        mode = logprob_mode(turn.replica, self._services.settings)
        calls = call_records(turn, outcome, choices, frozen=frozen, logprob_mode=mode)
        size = sum(call.size_bytes for call in calls)
        # A long text is compressed beside everybody else's calls.
        records = _encoded(calls) if size <= _LONG_BYTES else await asyncio.to_thread(_encoded, calls)
        with Waiting(STORE):
            total = await self._services.sessions.commit(turn.session_id, turn.call_ids[0], records, size)
        turn.times.begin(REPLY)
        prompt_ids = prompt_of(turn, outcome)[0]
        turn.tree.committed(calls, prompt_ids, total)
        turn.draft.keep()
        remember(turn.tree, turn.found)
        self._services.trees.weigh(turn.tree)
        if turn.plan is not None:
            turn.tree.rendered(turn.call_ids[0], turn.plan.rendering)
        self._services.metrics.recorded(calls, time.perf_counter() - turn.clock, turn.engine_seconds)
        tokens = outcome.prompt_tokens or (0 if prompt_ids is None else len(prompt_ids))
        reply = Reply(turn.call_ids[0], turn.request.model, int(turn.started_at), tokens, choices, outcome.cached_tokens)
        if turn.request.wants_ids and prompt_ids is not None:
            reply.prompt_ids = prompt_ids.tolist()
        return reply


def _encoded(calls: Sequence[Call]) -> dict[str, bytes]:
    return {call.call_id: encode(call) for call in calls}


# The call's intent: written to the store while the call goes on, and withdrawn if nothing is sampled.


_TRIES = 50
"""How often a call starts over because other calls of its session were recorded meanwhile."""


class WritingIntent:
    """The intent of `turn` at its replica. When other calls of the session were recorded meanwhile, the parent is looked for again."""

    def __init__(self, services: Services, planner: Planner, turn: Turn) -> None:
        self._services = services
        self._planner = planner
        self._turn = turn
        self._task = asyncio.create_task(self._write())

    @property
    def is_written(self) -> bool:
        return self._task.done() and not self._task.cancelled() and self._task.exception() is None

    async def written(self) -> None:
        """Returns when it is. Raises Conflict for a session that is not open, NotFound where there is none, and as the store."""
        await asyncio.shield(self._task)

    async def take_back(self) -> None:
        """The call is not sampled: drop the intent, if it was written."""
        try:
            await self.written()
        except VerbatimError:
            return
        await self._services.sessions.drop_intent(self._turn.session_id, self._turn.call_ids[0])

    def give_up(self) -> None:
        """Nobody waits for it any more."""
        self._task.cancel()

    async def _write(self) -> None:
        turn, sessions = self._turn, self._services.sessions
        for _ in range(_TRIES):
            assert turn.replica is not None and turn.found is not None
            check_budget(turn, self._services.inflight.of(turn.session_id))
            parent_id = turn.found.parent.call_id if turn.found.parent else None
            intent = Intent(turn.call_ids[0], parent_id, turn.digest, turn.replica.name, turn.started_at)
            known = turn.tree.known
            begun = await sessions.begin(turn.session_id, known, intent, self._services.settings.max_session_bytes)
            if begun.status == "missing" or (begun.created_at and begun.created_at != turn.tree.info.created_at):
                self._services.trees.forget(turn.session_id)
                raise NotFound(f"session '{turn.session_id}' does not exist")
            if begun.accepted:
                return
            if begun.status == "full":
                raise _full(turn.session_id, self._services.settings.max_session_bytes)
            if begun.status != "open":
                raise Conflict(f"session '{turn.session_id}' is {begun.status}; it takes no more calls")
            if turn.tree.learn(begun.records, known):
                self._planner.find_again(turn)
        raise Unavailable(f"session '{turn.session_id}' is too busy; try again")


def _full(session_id: str, most_bytes: int) -> SessionFull:
    return SessionFull(
        f"session '{session_id}' has recorded all that one session may, {most_bytes} bytes: close it, or raise "
        "VERBATIM_MAX_SESSION_BYTES"
    )


# Planner: finds the call that this one continues, and the prompt to sample after.
#
# `find` looks for the parent. For a replica that takes ids, `plan` makes the prompt's ids and sampling that fits the window;
# `proxy.call.plan` and `proxy.call.prompts` prove the ids. Both leave their result on the turn.


class Planner:
    """`retain_thinking`: a template that drops earlier thinking at a new user turn does not branch there."""

    def __init__(self, kinds: EngineKinds, *, retain_thinking: bool) -> None:
        self._kinds = kinds
        self._retain_thinking = retain_thinking

    def find(self, turn: Turn) -> None:
        """Leave on the turn what it continues."""
        turn.times.begin(PLAN)
        turn.found = _found(turn)

    def find_again(self, turn: Turn) -> None:
        """The same, where the calls that the tree has just learned change it."""
        found = _found(turn)
        if turn.found is None or found.parent is not turn.found.parent:
            turn.found = found

    def plans(self, turn: Turn) -> bool:
        """Whether there is something to plan; on the chat path the engine makes the ids."""
        assert turn.replica is not None
        return self._kinds.of(turn.replica).takes_ids

    async def plan(self, turn: Turn) -> Continuation:
        """Where it plans, make the prompt's ids after what was found, and the sampling that fits the window. Returns what it is planned
        for: meanwhile something else may have been found."""
        assert turn.replica is not None and turn.found is not None
        clock, found = time.perf_counter(), turn.found
        if turn.request.prompt is None:
            found, turn.plan = await self._of_messages(turn, found, turn.replica)
        else:
            tokenizer = self._kinds.of(turn.replica).tokenizer(turn.replica, turn.request, self._kinds.id_text(turn.session_id))
            turn.plan = await plan_prompt(turn.tree, found, turn.request, tokenizer)
        turn.engine_seconds += time.perf_counter() - clock
        fit_window(turn, len(turn.plan.prompt_ids))
        fit_budget(turn, len(turn.plan.prompt_ids))
        return found

    async def _of_messages(self, turn: Turn, found: Continuation, replica: Replica) -> tuple[Continuation, TokenPlan]:
        refuse_media(turn.request, found, self._kinds)
        kind, id_text = self._kinds.of(replica), self._kinds.id_text(turn.session_id)

        async def render(rendering: Rendering) -> Rendered:
            return await kind.render(replica, turn.request, rendering, id_text)

        confirmed = await confirm(turn.tree, found, turn.request, render)
        if turn.found is found:
            turn.found = confirmed
        found = confirmed
        known = turn.tree.turn_ends.get(found.root)
        plan, close = await plan_tokens(turn.tree, found, turn.request, render, known, self._retain_thinking)
        if close is not None:
            turn.tree.turn_ends[found.root] = close
        return found, plan


def _found(turn: Turn) -> Continuation:
    assert turn.replica is not None
    find = continuation if turn.request.prompt is None else prompt_continuation
    return find(turn.tree, turn.request, turn.replica.policy)


# A session's `sampling` (`POST /sessions`) holds two kinds of fields: parameters that override the harness's own, and what to record for
# the trainer, which no harness sees: `top_logprobs`, `prompt_logprobs`, `routed_experts`. Otherwise the settings apply.


_KEPT = ("top_logprobs", "prompt_logprobs", "routed_experts")


def overrides(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a session's `sampling`."""
    return {name: value for name, value in sampling.items() if name not in _KEPT}


def wanted_of(turn: Turn, settings: Settings) -> Wanted:
    """What is asked of the engine for the trainer; of routed experts only those of positions that no record has."""
    sampling = turn.tree.info.sampling
    kept = {name: sampling.get(name, getattr(settings, f"keep_{name}")) for name in _KEPT}
    wanted = Wanted(**kept)
    if not wanted.routed_experts or turn.plan is None or turn.found is None:
        return wanted
    where = place(turn.tree, turn.found, turn.plan.prompt_ids, turn.plan.branch_reason)
    base = turn.tree.forest.calls[where.base_id].node if where.base_id is not None else None
    if base is None or base.details is None or base.details.routed_experts is None:
        return wanted
    return replace(wanted, routed_from=where.base_length - 1)


def logprob_mode(replica: Replica, settings: Settings) -> str:
    """The mode of the replica's logprobs: as it says itself, else as its operator says of its policy's engines."""
    return replica.logprob_mode or settings.engine_logprob_modes.get(replica.policy) or UNKNOWN_MODE
