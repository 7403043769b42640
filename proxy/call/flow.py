"""The path of one call: one line for all dialects and engines, streamed or not.

`Flow.run` reads like the steps: a replica, the parent and the intent, the prompt, sampling, the commit. While the engine samples, what
the harness may see already is emitted. The engine is asked only once the intent is in the store, and the reply is returned only once
its record is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from proxy.call.budget import claim_share, count_left, exhaust_total, fit_budget
from proxy.call.cache import SessionCache
from proxy.call.lookahead import choose, find_lookahead
from proxy.call.media import ImageCache
from proxy.call.peers import Peers
from proxy.call.prompts import plan_prompt, prompt_continuation
from proxy.call.record import call_records, mint_deltas, minted_choice, place, warn_of_renderings
from proxy.call.recording import Live, Recalled, Recording, Refused, Replayed
from proxy.call.replay import Replays, build_reply, play
from proxy.call.session import Draft, Session
from proxy.call.turn import (
    Continuation,
    Planned,
    Sampled,
    TokenPlan,
    Turn,
    check_places,
    confirm_by_ids,
    continuation,
    fit_window,
    marks_of,
    parent_of,
    plan_tokens,
    refuse_images,
    refuse_media,
    remember,
    take_prompt,
)
from proxy.dialects.base import Choice, Delta, FirstToken, ParsedMessage, PromptReady, Reply, Request, new_call_id
from proxy.engine.apis.base import PlanRequest, PlansNoMore, SamplingJob
from proxy.engine.apis.renderer import Rendered
from proxy.engine.apis.reply import EngineReply, WantedDetails, check_sampled
from proxy.engine.in_vllm.frames import BUDGET
from proxy.engine.pool.pool import EnginePool, Placement
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import EngineCall, Replica
from proxy.errors import (
    ChooserFailed,
    Conflict,
    EngineFailed,
    EngineUnavailable,
    NotFound,
    RequestError,
    SessionFull,
    StoreUnavailable,
    Unavailable,
    VerbatimError,
)
from proxy.metrics import Metrics
from proxy.outbound import Outbound
from proxy.settings import Settings
from proxy.store.sessions import Begun, SessionStore
from proxy.store.states import NO_SHARE, Intent, Lookahead, SessionInfo, Share
from proxy.timeline import COMMIT, ENGINE, INTENT, PLAN, QUEUE, REPLY, SAMPLE, STORE, CancelScope, Inflight, Timeline, Waiting
from reconstruct.codec import encode
from reconstruct.prompt import Prompt, Rendering
from reconstruct.records import Call
from reconstruct.roles import find_purpose

_TRIES = 50
"""How often a call looks for its parent again because other calls of its session were recorded meanwhile."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Between two looks whether calls beside it have left something of the session's budget, in seconds."""

_JUDGE_TOKENS = 4096
"""What a judge may think before it chooses."""

_LONG_BYTES = 2**20
"""Records of more than this take a while to be compressed."""

Emit = Callable[[PromptReady | FirstToken | Sequence[Delta]], None]
"""Takes what the harness may see: PromptReady once the prompt is known, FirstToken, and deltas."""


class Flow:
    def __init__(
        self,
        settings: Settings,
        pool: EnginePool,
        sessions: SessionStore,
        trees: SessionCache,
        inflight: Inflight,
        peers: Peers,
        metrics: Metrics,
        media: ImageCache,
        outbound: Outbound,
    ) -> None:
        self._outbound = outbound
        self._media = media
        self._settings = settings
        self._pool = pool
        self._kinds = pool.kinds
        self._sessions = sessions
        self._trees = trees
        self._inflight = inflight
        self._peers = peers
        self._metrics = metrics
        self._replays = Replays(pool, sessions, trees, metrics)

    async def recall(
        self, draft: Draft, recording: Recording, request: Request, digest: bytes, headers: Mapping[str, str]
    ) -> Recalled:
        """What a fork's recording makes of the request, before the call enters; `digest`: of its body. Raises as `Replays.recall`."""
        retry = headers.get("x-stainless-retry-count", "0") != "0"
        return await self._replays.recall(draft, recording, request, digest, retry=retry)

    def admit(
        self,
        draft: Draft,
        request: Request,
        digest: bytes,
        headers: Mapping[str, str],
        timeline: Timeline,
        recalled: Recalled | None = None,
    ) -> Turn:
        """The call enters: from here on closing the session or the service ends it properly. `run` must follow."""
        info = draft.tree.info
        recorded = recalled.calls if isinstance(recalled, Replayed) else ()
        purpose = find_purpose(marks_of(request, headers), self._settings.role_rules, info.role_rules)
        lookahead = None if recorded or info.lookahead is None else find_lookahead(info, request, purpose.role)
        if lookahead is not None:
            request = replace(request, n=lookahead.n)
        call_ids = [call.call_id for call in recorded] or [new_call_id() for _ in range(request.n)]
        retry = headers.get("x-stainless-retry-count", "0")
        marks = {**request.marks, "retry": retry} if retry != "0" else request.marks
        turn = Turn(
            info.session_id,
            call_ids[0],
            draft.tree,
            draft,
            request,
            digest,
            call_ids,
            CancelScope(info.session_id, call_ids[0]),
            started_at=recorded[0].started_at if recorded else time.time(),
            clock=time.perf_counter(),
            timeline=timeline,
            sampling={**request.sampling, **overrides(info.sampling)},
            marks={**marks, **recalled.marks} if isinstance(recalled, Live) else marks,
            purpose=purpose,
            recalled=recalled,
            lookahead=lookahead,
        )
        self._inflight.enter(turn.scope)
        return turn

    async def run(self, turn: Turn, emit: Emit) -> Reply:
        """The recorded reply. Raises VerbatimError; then nothing is half recorded, and nothing was emitted unless FirstToken was."""
        try:
            if isinstance(turn.recalled, Replayed):
                return await self._replay(turn, turn.recalled, emit)
            if isinstance(turn.recalled, Refused):
                raise turn.recalled.error
            shown = emit if turn.lookahead is None else partial(_withhold, emit)
            sampled = await self._sample_at_some_replica(turn, partial(self._sample_at, turn, shown))
            failed = None
            if turn.lookahead is not None:
                sampled, failed = await self._choose(sampled, turn.lookahead)
            reply = await self._commit(sampled)
        finally:
            self._inflight.leave(turn.scope)
        if sampled.outcome.broken is not None:
            # What was sampled is recorded; the harness must not take it for a whole reply.
            raise failed or EngineFailed(sampled.outcome.broken)
        if turn.lookahead is not None and not sampled.chosen:
            raise EngineFailed("the call was cut before a candidate was chosen")
        return reply

    async def _choose(self, sampled: Sampled, lookahead: Lookahead) -> tuple[Sampled, ChooserFailed | None]:
        """The call with its chosen candidate, or as one that broke off, and why. One that was cut gets none."""
        if sampled.outcome.broken is not None or sampled.planned.turn.scope.cancelled:
            return sampled, None
        try:
            return await choose(sampled, lookahead, self._ask_judge, self._outbound), None
        except ChooserFailed as error:
            sampled.outcome.broken = error.message
            return sampled, error

    async def _ask_judge(self, turn: Turn, model: str, prompt: str, answers: Sequence[str]) -> str:
        """What the model answers to the prompt. A call of no session: nothing of it is recorded."""
        info = SessionInfo(turn.session_id, b"", turn.tree.info.created_at)
        tree = Session(info)
        history = [tree.digest(ParsedMessage({"role": "user", "content": prompt}))]
        forward = {"structured_outputs": {"choice": list(answers)}}
        sampling = {"temperature": 0.0, "max_tokens": _JUDGE_TOKENS}
        request = Request("chat", model, history, sampling=sampling, forward=forward, stream=True)
        scope = CancelScope(turn.session_id, new_call_id())
        judging = Turn(
            turn.session_id,
            scope.call_id,
            tree,
            Draft(tree),
            request,
            b"",
            [scope.call_id],
            scope,
            started_at=time.time(),
            clock=turn.clock,
            timeline=Timeline(),
            sampling=sampling,
            marks={},
            purpose=turn.purpose,
        )

        async def sample(replica: Replica) -> Sampled:
            found = continuation(tree, request, replica.policy)
            return await self._plan_and_sample(judging, replica, found, NO_SHARE, lambda piece: None)

        sampled = await self._sample_at_some_replica(judging, sample)
        if sampled.outcome.broken is not None:
            raise ChooserFailed(f"the judge's reply broke off: {sampled.outcome.broken}")
        return str(sampled.outcome.choices[0].message.get("content") or "")

    async def _replay(self, turn: Turn, replayed: Replayed, emit: Emit) -> Reply:
        """The reply that was recorded, without an engine."""
        reply = build_reply(replayed.recording, turn.request, replayed.calls)
        pace = replayed.recording.fork.tokens_per_second
        if pace is not None and turn.request.stream:
            await play(turn.request, reply, emit, pace, turn.scope)
        return reply

    async def count(self, draft: Draft, request: Request) -> int:
        """How many tokens the request's prompt has, as the engine counts them; nothing is recorded."""
        replica = self._pool.pick(draft.tree.info.session_id, request.model)
        kind = self._kinds.of(replica)
        request.engine_messages = draft.tree.engine_messages(request.history)
        if request.images:
            refuse_images(request, kind)
            await self._media.load(draft, request)
        return await kind.count(replica, request)

    async def _sample_at_some_replica(self, turn: Turn, sample: Callable[[Replica], Awaitable[Sampled]]) -> Sampled:
        """What the first replica that can be reached samples. Another one is tried only where nothing was sampled yet."""
        async with self._pool.place(turn.request.model, Caller(turn.session_id, partial(self._check_open, turn))) as placement:
            while True:
                turn.timeline.begin(QUEUE)
                with turn.scope.interruptible(), Waiting(ENGINE):
                    replica = await placement.next()
                try:
                    return await sample(replica)
                except EngineUnavailable as error:
                    if turn.timeline.first_token_at or turn.scope.cancelled:
                        raise
                    if not placement.try_another() and not await self._wait_out(turn, placement, error):
                        raise

    async def _wait_out(self, turn: Turn, placement: Placement, error: EngineUnavailable) -> bool:
        """Whether the engines can be asked again, now that the time has passed which they asked to wait."""
        turn.timeline.begin(QUEUE)
        with turn.scope.interruptible(), Waiting(ENGINE):
            return await placement.wait_out(error)

    async def _sample_at(self, turn: Turn, emit: Emit, replica: Replica) -> Sampled:
        found, granted = await self._begin(turn, replica)
        try:
            return await self._plan_and_sample(turn, replica, found, granted, emit)
        except VerbatimError:
            if not (turn.scope.hung_up and turn.scope.may_have_sampled):
                # Otherwise the engine may have sampled tokens that are not known here, and the intent says so.
                await self._sessions.drop_intent(turn.session_id, turn.call_id)
            raise

    async def _begin(self, turn: Turn, replica: Replica) -> tuple[Continuation, Share]:
        """Find the call that this one continues and record the intent, again where other processes recorded calls meanwhile, with what it
        reserves of the session's budget.

        Raises Conflict for a session that is not open, NotFound where there is none, SessionFull, BudgetExhausted, and as the store."""
        turn.timeline.replica, turn.timeline.api = replica.name, replica.api or ""
        turn.timeline.begin(INTENT)
        find = continuation if turn.request.prompt is None else prompt_continuation
        tries, waits, held = _TRIES, 0, NO_SHARE
        while tries:
            found = find(turn.tree, turn.request, replica.policy)
            left = count_left(turn.tree.info, turn.tree.forest) if turn.tree.has_budget else NO_SHARE
            share = claim_share(turn, left, held, replica.max_model_len) if turn.tree.has_budget else NO_SHARE
            if share is None:
                with turn.scope.interruptible():
                    await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(waits, 8)))
                tries, waits, held = _TRIES, waits + 1, NO_SHARE
                continue
            known = turn.tree.known
            begun = await self._write_intent(turn, replica, found, left, share)
            if begun.accepted:
                turn.request.engine_messages = turn.tree.engine_messages(turn.request.history)
                return found, share
            if begun.status == "reserved":
                held = NO_SHARE if await self._peers.give_up_dead(turn.session_id) else begun.reserved
                continue
            tries -= 1
            self._trees.check_open(turn.tree, begun)
            if begun.status == "full":
                raise _full(turn.session_id, self._settings.max_session_bytes)
            turn.tree.learn(begun.records, known)
        raise Unavailable(f"session '{turn.session_id}' is too busy; try again")

    async def _write_intent(self, turn: Turn, replica: Replica, found: Continuation, left: Share, share: Share) -> Begun:
        parent_id = found.parent.call_id if found.parent else None
        intent = Intent(turn.call_id, parent_id, turn.digest, replica.name, turn.started_at)
        most, created_at = self._settings.max_session_bytes, turn.tree.info.created_at
        known = turn.tree.known
        with Waiting(STORE):
            return await self._sessions.begin(
                turn.session_id, known, intent, most, left=left, wanted=share, created_at=created_at
            )

    async def _plan_and_sample(self, turn: Turn, replica: Replica, found: Continuation, granted: Share, emit: Emit) -> Sampled:
        try:
            return await self._sample(await self._plan(turn, replica, found, granted), emit)
        except PlansNoMore:
            return await self._sample(await self._plan(turn, replica, found, granted), emit)

    async def _plan(self, turn: Turn, replica: Replica, found: Continuation, granted: Share) -> Planned:
        """The prompt's ids, for an engine that takes ids and does not plan itself, and sampling that fits window and budget."""
        kind, sampling = self._kinds.of(replica), dict(turn.sampling)
        if turn.tree.has_budget:
            fit_budget(turn, granted, sampling)
        if turn.request.images and not turn.request.image_bytes:
            await self._media.load(turn.draft, turn.request)
        if not kind.takes_ids:
            return Planned(turn, replica, found, None, sampling, granted)
        turn.timeline.begin(PLAN)
        if turn.request.prompt is None:
            refuse_media(turn.request, found, self._kinds, kind)
        if kind.plans(replica, turn.request):
            return Planned(turn, replica, found, None, sampling, granted)
        with turn.scope.interruptible():
            if turn.request.prompt is None:
                found, plan = await self._plan_messages(turn, replica, found)
            else:
                tokenizer = kind.tokenizer(replica, turn.request, self._kinds.id_text(turn.session_id))
                plan = await plan_prompt(turn.tree, found, turn.request, tokenizer)
        if plan.media or turn.request.images:
            check_places(turn.request, plan.media)
        fit_window(turn.request, replica, sampling, len(plan.prompt_ids))
        if turn.tree.has_budget:
            fit_budget(turn, granted, sampling, len(plan.prompt_ids))
        return Planned(turn, replica, found, plan, sampling, granted)

    async def _plan_messages(self, turn: Turn, replica: Replica, found: Continuation) -> tuple[Continuation, TokenPlan]:
        kind, id_text = self._kinds.of(replica), self._kinds.id_text(turn.session_id)

        async def render(rendering: Rendering) -> Rendered:
            return await kind.render(replica, turn.request, rendering, id_text)

        return await plan_tokens(turn.tree, found, turn.request, render, self._settings.thinking == "retain")

    async def _sample(self, planned: Planned, emit: Emit) -> Sampled:
        turn, replica, plan = planned.turn, planned.replica, planned.plan
        turn.timeline.begin(SAMPLE)
        planned, wanted = want_details(planned, self._settings)
        served = replica.serve(turn.request.model)
        job = SamplingJob(turn.call_id, turn.request, planned.sampling, turn.scope, wanted=wanted, served=served)
        job.id_text = self._kinds.id_text(turn.session_id)
        if plan is not None:
            job.prompt_ids, job.body, job.media = plan.prompt_ids, plan.body, plan.media

        def take_plan(prompt: Prompt, body: dict[str, Any]) -> None:
            nonlocal planned
            check_places(turn.request, prompt.media)
            found, made = take_prompt(turn.tree, planned.found, prompt, body)
            planned = replace(planned, found=found, plan=made)
            if turn.request.stream:
                emit(PromptReady(len(prompt.ids)))

        if plan is None and self._kinds.of(replica).plans(replica, turn.request):
            job.plan = self._ask_to_plan(planned, job.wanted, take_plan)
        elif turn.request.stream:
            emit(PromptReady(0 if plan is None else len(plan.prompt_ids)))

        outcome = await self._ask_engine(turn, replica, job, emit)
        if planned.plan is None and turn.request.images:
            # Equal ids are equal context only where the same images stand behind them, and a chat endpoint does not say where.
            outcome.prompt_ids = None
        check_sampled(outcome, self._find_engine_mode(replica))
        for choice in outcome.choices:
            choice.base_spans = choice.spans if served.adapter else ()
            choice.spans = served.read_spans(choice.spans)
        return Sampled(planned, outcome)

    async def _ask_engine(self, turn: Turn, replica: Replica, job: SamplingJob, emit: Emit) -> EngineReply:
        """What the engine sampled. Pieces get the ids that the service minted, and none is emitted once the call has moved elsewhere."""
        call = EngineCall(replica, turn.scope, streams=turn.request.stream and not job.wanted.prompt_logprobs)

        def mint_and_emit(piece: FirstToken | Sequence[Delta]) -> None:
            if call.moved:
                return
            if isinstance(piece, FirstToken):
                turn.timeline.mark_first_token()
                emit(piece)
            else:
                emit(mint_deltas(piece, turn.call_ids))

        kind = self._kinds.of(replica)
        abort = partial(kind.abort, replica, job)
        job.served.aborts.add(abort)
        try:
            with call, turn.scope.sampling(abort):
                return await kind.sample(replica, job, stream=turn.request.stream, emit=mint_and_emit)
        except RequestError as error:
            if job.plan is not None and error.param == BUDGET:
                raise exhaust_total(turn) from error
            raise
        finally:
            job.served.aborts.discard(abort)

    def _ask_to_plan(
        self, planned: Planned, wanted: WantedDetails, take: Callable[[Prompt, dict[str, Any]], None]
    ) -> PlanRequest:
        """What the engine needs to plan the prompt."""
        tree, found = planned.turn.tree, planned.found
        details = None if found.parent is None else found.parent.node.details
        known = wanted.routed_experts and details is not None and details.routed_experts is not None
        return PlanRequest(
            parent_of(tree, found, planned.turn.request),
            tree.turn_ends.get(found.root),
            self._settings.thinking == "retain",
            planned.granted.total_tokens,
            known,
            take,
        )

    async def _commit(self, sampled: Sampled) -> Reply:
        """Record every choice in one step, then let the tree and the reply know them."""
        planned, outcome, turn = sampled.planned, sampled.outcome, sampled.planned.turn
        turn.timeline.begin(COMMIT)
        has_content = any(each.token_ids or each.message.get("content") for each in outcome.choices)
        if turn.scope.cancelled and not has_content:
            await self._sessions.drop_intent(turn.session_id, turn.call_id)
            raise EngineFailed("the call was cut before a token was sampled")
        forced = isinstance(turn.request.forward.get("tool_choice"), dict)
        choices = [minted_choice(each, turn.call_ids, forced_tool=forced) for each in outcome.choices]
        frozen = self._pool.is_frozen(planned.replica, turn.request.model)
        found = confirm_by_ids(turn.tree, planned.found, sampled.prompt_ids)
        kind, engine_mode = self._kinds.of(planned.replica), self._find_engine_mode(planned.replica)
        calls = call_records(sampled, found, choices, frozen=frozen, kind=kind, engine_mode=engine_mode)
        size = sum(call.size_bytes for call in calls)
        # A long text is compressed beside everybody else's calls.
        records = _encoded(calls) if size <= _LONG_BYTES else await asyncio.to_thread(_encoded, calls)
        if turn.request.images:
            await self._media.keep(turn)
        with Waiting(STORE):
            created_at = turn.tree.info.created_at
            total = await self._sessions.commit(turn.session_id, turn.call_id, records, size, created_at=created_at)
        turn.timeline.begin(REPLY)
        turn.tree.committed(calls, sampled.prompt_ids, total)
        turn.draft.keep()
        remember(turn.tree, found)
        self._trees.weigh(turn.tree)
        if planned.plan is not None:
            turn.tree.rendered(turn.call_id, planned.plan.rendering)
        warn_of_renderings(planned.replica, calls, choices)
        self._metrics.recorded(calls, time.perf_counter() - turn.clock, turn.timeline.engine_seconds)
        return _reply(sampled, choices if turn.lookahead is None else choices[:1])

    def _find_engine_mode(self, replica: Replica) -> str:
        """vLLM's `--logprobs-mode`: as the replica says itself, else as its operator says of its policy's engines; "" if neither does."""
        modes = self._settings.engine_logprob_modes
        return replica.logprob_mode or modes.get(replica.policy) or modes.get(replica.host.policy) or ""

    async def _check_open(self, turn: Turn) -> None:
        """Raises Conflict when the session was closed, by whichever process, and NotFound when it was deleted."""
        with contextlib.suppress(StoreUnavailable):
            state = await self._sessions.load(turn.session_id)
            if state is None or state.info.created_at != turn.tree.info.created_at:
                raise NotFound(f"session '{turn.session_id}' does not exist")
            if state.status != "open":
                raise Conflict(f"session '{turn.session_id}' is {state.status}; it takes no more calls")


def _full(session_id: str, most_bytes: int) -> SessionFull:
    return SessionFull(
        f"session '{session_id}' has recorded all that one session may, {most_bytes} bytes: close it, or raise "
        "VERBATIM_MAX_SESSION_BYTES"
    )


def _withhold(emit: Emit, piece: PromptReady | FirstToken | Sequence[Delta]) -> None:
    """Nothing of a candidate is shown before one is chosen."""
    if isinstance(piece, PromptReady):
        emit(piece)


def _encoded(calls: Sequence[Call]) -> dict[str, bytes]:
    return {call.call_id: encode(call) for call in calls}


def _reply(sampled: Sampled, choices: list[Choice]) -> Reply:
    turn, outcome, prompt_ids = sampled.planned.turn, sampled.outcome, sampled.prompt_ids
    tokens = outcome.prompt_tokens or (0 if prompt_ids is None else len(prompt_ids))
    reply = Reply(turn.call_id, turn.request.model, int(turn.started_at), tokens, choices, outcome.cached_tokens)
    if turn.request.wants_ids and prompt_ids is not None:
        reply.prompt_ids = prompt_ids.tolist()
    if len(choices) == len(outcome.choices):
        # Of candidates that are not shown the engine counts the tokens too.
        reply.counted_tokens = outcome.completion_tokens
    return reply


# A session's `sampling` (`POST /sessions`) holds two kinds of fields: parameters that override the harness's own, and what to record for
# the trainer, which no harness sees: `top_logprobs`, `prompt_logprobs`, `routed_experts`. Otherwise the settings apply.


_KEPT = ("top_logprobs", "prompt_logprobs", "routed_experts")


def overrides(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters of a session's `sampling`."""
    return {name: value for name, value in sampling.items() if name not in _KEPT}


def want_details(planned: Planned, settings: Settings) -> tuple[Planned, WantedDetails]:
    """The details to ask the engine for; of routed experts only those of positions that no record has. The prompt is then stored on the
    call that has the others, whatever is recorded meanwhile."""
    tree, plan = planned.turn.tree, planned.plan
    kept = {name: tree.info.sampling.get(name, getattr(settings, f"keep_{name}")) for name in _KEPT}
    wanted = WantedDetails(**kept)
    if not wanted.routed_experts or plan is None:
        return planned, wanted
    where = place(tree, planned.found, plan.prompt_ids, plan.branch_reason)
    base = tree.forest.calls[where.base_id].node if where.base_id is not None else None
    if base is None or base.details is None or base.details.routed_experts is None:
        return planned, wanted
    found = replace(planned.found, base=where.base_id)
    return replace(planned, found=found), replace(wanted, routed_from=where.base_length - 1)
