"""The path of one call: one line for all dialects and engines, streamed or not.

`run_call` reads like the steps: a replica, the parent and the intent, the prompt, sampling, the records, the commit. While the engine
samples, what the harness may see already is emitted. The engine is asked only once the intent is in the store, and the reply is returned
only once its record is.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import msgspec

from proxy.call.budget import claim_share, count_left, exhaust_total
from proxy.call.draft import Draft
from proxy.call.hooks import choose_hooks, run_after_sampling, run_before_commit
from proxy.call.phases import Admitted, Arrival, Continuation, Emit, Placed, Sampled
from proxy.call.plan import MESSAGES, accept_prompt, check_media, confirm_parent, find_room, keep_history, parent_of, read_marks
from proxy.call.prompts import PROMPT
from proxy.call.record import build_records, build_reply, locate, mint_choices, mint_deltas, warn_of_renderings
from proxy.dialects.base import Delta, FirstToken, PromptReady, Reply, Request, new_call_id
from proxy.engine.apis.base import PlanRequest, PlansNoMore, SamplingJob
from proxy.engine.apis.json_text import NO_IDS
from proxy.engine.apis.reply import EngineReply, WantedDetails, check_sampled
from proxy.engine.in_vllm.frames import BUDGET
from proxy.engine.pool.placement import Placement
from proxy.engine.pool.seats import Caller
from proxy.engine.replica import EngineCall, Replica
from proxy.errors import (
    Conflict,
    EngineFailed,
    NotFound,
    RequestError,
    SessionFull,
    StoreUnavailable,
    Unavailable,
    VerbatimError,
)
from proxy.services import Services
from proxy.settings import Settings
from proxy.store.sessions import Begun
from proxy.store.states import NO_SHARE, Intent, Share
from proxy.timeline import COMMIT, INTENT, PLAN, REPLY, SAMPLE, CancelScope, Timeline
from reconstruct.codec import encode
from reconstruct.media import Media, find_placeholders, name_ranges
from reconstruct.records import Call
from reconstruct.roles import find_purpose

_TRIES = 50
"""How often a call looks for its parent again because other calls of its session were recorded meanwhile."""

_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
"""Between two looks whether calls beside it have left something of the session's budget, in seconds."""

_LONG_BYTES = 2**20
"""Records of more than this take a while to be compressed."""

_replace = msgspec.structs.replace


async def admit(
    draft: Draft, request: Request, digest: bytes, headers: Mapping[str, str], timeline: Timeline, services: Services
) -> Admitted:
    """The request, whose body has this digest, becomes a call: from here on closing the session or the service ends it properly. `run_call`
    must follow. Raises what a hook refuses it with."""
    info = draft.session.info
    purpose = find_purpose(read_marks(request, headers), services.settings.role_rules, info.role_rules)
    retries = headers.get("x-stainless-retry-count", "0")
    marks = request.marks if retries == "0" else {**request.marks, "retry": retries}
    arrival = Arrival(draft, request, headers, digest, purpose, marks, retries != "0")
    hooks = choose_hooks(services.hooks, info, request)
    for hook in hooks.admit:
        await hook(arrival)
    overrides = {name: value for name, value in info.sampling.items() if name not in _KEPT}
    call_ids = arrival.call_ids or [new_call_id() for _ in range(arrival.request.n)]
    call = Admitted(
        info.session_id,
        call_ids[0],
        draft.session,
        draft,
        request,
        arrival.request,
        digest,
        call_ids,
        CancelScope(info.session_id, call_ids[0]),
        time.time() if arrival.started_at is None else arrival.started_at,
        time.perf_counter(),
        timeline,
        {**request.sampling, **overrides},
        arrival.marks,
        purpose,
        MESSAGES if request.prompt is None else PROMPT,
        arrival.withheld,
        arrival.recorded,
        hooks,
    )
    services.inflight.enter(call.scope)
    return call


async def run_call(call: Admitted, emit: Emit, services: Services) -> Reply:
    """The recorded reply. Raises VerbatimError; then nothing is half recorded, and nothing was emitted unless FirstToken was."""
    try:
        if call.recorded is not None:
            return await call.recorded.give(call, emit)
        caller = Caller(call.session_id, partial(_check_open, call, services))
        placement = Placement(services.pool, call.request.model, caller, call.scope, call.timeline)
        sampled = await placement.run(partial(sample_at, call, emit, services))
        sampled = await run_after_sampling(sampled)
        call.timeline.begin(COMMIT)
        await _drop_empty(sampled, services)
        sampled = await run_before_commit(sampled)
        choices = mint_choices(sampled)
        found = confirm_parent(call.session, sampled.placed.found, sampled.prompt_ids)
        records = build_records(sampled, found, choices, services)
        total = await commit(call, records, services)
        for hook in call.hooks.after_commit:
            hook(call, records)
        call.timeline.begin(REPLY)
        remember(sampled, found, records, total, services)
        warn_of_renderings(sampled.placed.replica, records, choices)
        services.metrics.count_calls(records, time.perf_counter() - call.clock, records[0].engine_seconds)
    finally:
        services.inflight.leave(call.scope)
    if sampled.error is not None:
        # What was sampled is recorded; the harness must not take it for a whole reply.
        raise sampled.error
    return build_reply(sampled, choices[: call.asked.n])


async def sample_at(call: Admitted, emit: Emit, services: Services, replica: Replica) -> Sampled:
    """What the replica samples. Raises VerbatimError: then no intent is left, unless tokens may have been sampled that nobody knows."""
    found, granted = await begin(call, replica, services)
    try:
        for hook in call.hooks.before_sampling:
            await hook(call.draft, call.request, replica)
        try:
            return await sample(await plan(call, replica, found, granted, services), emit, services)
        except PlansNoMore:
            return await sample(await plan(call, replica, found, granted, services), emit, services)
    except VerbatimError:
        if not (call.scope.hung_up and call.scope.may_have_sampled):
            await services.sessions.drop_intent(call.session_id, call.call_id)
        raise


async def begin(call: Admitted, replica: Replica, services: Services) -> tuple[Continuation, Share]:
    """Find the call that this one continues and record the intent, again where other processes recorded calls meanwhile, with what it
    reserves of the session's budget.

    Raises Conflict for a session that is not open, NotFound where there is none, SessionFull, BudgetExhausted, and as the store."""
    session = call.session
    call.timeline.replica, call.timeline.api = replica.name, replica.api or ""
    call.timeline.begin(INTENT)
    tries, waits, held = _TRIES, 0, NO_SHARE
    while tries:
        found = call.planner.find_parent(session, call.request, replica.policy)
        left, share = _reserve(call, replica, held) if session.has_budget else (NO_SHARE, NO_SHARE)
        if share is None:
            with call.scope.interruptible():
                await asyncio.sleep(min(_LONGEST_PAUSE, _FIRST_PAUSE * 2 ** min(waits, 8)))
            tries, waits, held = _TRIES, waits + 1, NO_SHARE
            continue
        known = session.known
        begun = await _write_intent(call, replica, found, left, share, services)
        if begun.accepted:
            call.request.engine_messages = session.engine_messages(call.request.history)
            return found, share
        if begun.status == "reserved":
            held = NO_SHARE if await services.peers.give_up_dead(call.session_id) else begun.reserved
            continue
        tries -= 1
        services.cache.check_open(session, begun)
        if begun.status == "full":
            raise _explain_full(call.session_id, services.settings.max_session_bytes)
        session.learn(begun.records, known)
    raise Unavailable(f"session '{call.session_id}' is too busy; try again")


def _reserve(call: Admitted, replica: Replica, held: Share) -> tuple[Share, Share | None]:
    """What is left of the session's budget, and what the call reserves of it beside what others have `held`; None: too little for now."""
    left = count_left(call.session.info, call.session.forest)
    most, window = call.sampling.get("max_tokens"), replica.max_model_len
    return left, claim_share(call.session.info, call.request.n, most, left, held, window)


async def _write_intent(
    call: Admitted, replica: Replica, found: Continuation, left: Share, share: Share, services: Services
) -> Begun:
    session, parent_id = call.session, found.parent.call_id if found.parent else None
    intent = Intent(call.call_id, parent_id, call.digest, replica.name, call.started_at)
    most, created_at = services.settings.max_session_bytes, session.info.created_at
    return await services.sessions.begin(
        call.session_id, session.known, intent, most, left=left, wanted=share, created_at=created_at
    )


def _explain_full(session_id: str, most_bytes: int) -> SessionFull:
    return SessionFull(
        f"session '{session_id}' has recorded all that one session may, {most_bytes} bytes: close it, or raise "
        "VERBATIM_MAX_SESSION_BYTES"
    )


async def plan(call: Admitted, replica: Replica, found: Continuation, granted: Share, services: Services) -> Placed:
    """The prompt's ids, for an engine that takes ids and does not plan itself, and parameters that fit window and budget."""
    kind, request = services.pool.kinds.of(replica), call.request
    sampling = find_room(call, None, granted)
    if not kind.takes_ids:
        return Placed(call, replica, kind, found, None, sampling, granted)
    call.timeline.begin(PLAN)
    call.planner.check(request, found, services.pool.kinds, kind)
    if kind.plans(replica, request):
        return Placed(call, replica, kind, found, None, sampling, granted)
    with call.scope.interruptible():
        retain = services.settings.thinking == "retain"
        found, made = await call.planner.plan(call.session, request, found, replica, services.pool.kinds, retain=retain)
    check_media(request, made.media)
    sampling = find_room(call, replica.max_model_len, granted, len(made.prompt_ids))
    return Placed(call, replica, kind, found, made, sampling, granted)


async def sample(placed: Placed, emit: Emit, services: Services) -> Sampled:
    """What the engine samples. Raises as `EngineKind.sample`, and EngineFailed for ids and logprobs that no token has."""
    call, replica = placed.call, placed.replica
    call.timeline.begin(SAMPLE)
    placed, job = _make_job(placed, services)
    if call.request.stream and job.plan is None:
        emit(PromptReady(len(job.prompt_ids)))
    reply = await _ask_engine(placed, job, emit)
    check_sampled(reply, replica.find_logprob_mode(services.settings.engine_logprob_modes))
    found, made, prompt_ids = placed.found, placed.plan, reply.prompt_ids
    if reply.plan is not None:
        found, made = accept_prompt(call.session, found, reply.plan.prompt, reply.plan.body)
    media: tuple[Media, ...] = ()
    placeholders: list[int] = []
    if made is not None:
        prompt_ids = made.prompt_ids
        if made.media:
            media, placeholders = name_ranges(made.media, call.request.images), find_placeholders(prompt_ids, made.media)
    placed = _replace(placed, found=found, plan=made, sampling={**placed.sampling, **reply.adjusted})
    choices = tuple(reply.choices)
    if job.served.adapter:
        # Their versions are the adapter's; those of the base model under it are noted.
        spans = job.served.read_spans
        choices = tuple(replace(each, spans=spans(each.spans), base_spans=each.spans) for each in choices)
    return Sampled(
        call,
        placed,
        choices,
        prompt_ids,
        reply.prompt_tokens,
        reply.cached_tokens,
        reply.completion_tokens,
        media,
        placeholders,
        reply.broken is not None,
        None if reply.broken is None else EngineFailed(reply.broken),
    )


def _make_job(placed: Placed, services: Services) -> tuple[Placed, SamplingJob]:
    call, plan = placed.call, placed.plan
    placed, wanted = want_details(placed, services.settings)
    plans = plan is None and placed.kind.plans(placed.replica, call.request)
    job = SamplingJob(
        call.call_id,
        call.request,
        placed.sampling,
        call.scope,
        NO_IDS if plan is None else plan.prompt_ids,
        {} if plan is None else plan.body,
        services.pool.kinds.id_text(call.session_id),
        wanted,
        _ask_to_plan(placed, wanted, services.settings) if plans else None,
        () if plan is None else plan.media,
        placed.replica.serve(call.request.model),
    )
    return placed, job


def _ask_to_plan(placed: Placed, wanted: WantedDetails, settings: Settings) -> PlanRequest:
    """What the engine needs to plan the prompt."""
    call, found = placed.call, placed.found
    details = None if found.parent is None else found.parent.node.details
    known = wanted.routed_experts and details is not None and details.routed_experts is not None
    return PlanRequest(
        parent_of(call.session, found, call.request),
        call.session.turn_ends.get(found.root),
        settings.thinking == "retain",
        placed.granted.total_tokens,
        known,
        partial(check_media, call.request),
    )


async def _ask_engine(placed: Placed, job: SamplingJob, emit: Emit) -> EngineReply:
    """What the engine sampled. Pieces get the ids that the service minted, and none is emitted once the call has moved elsewhere."""
    call, streams = placed.call, job.request.stream
    asked = EngineCall(placed.replica, call.scope, streams=streams and not job.wanted.prompt_logprobs)

    def mint_and_emit(piece: PromptReady | FirstToken | Sequence[Delta]) -> None:
        if asked.moved:
            return
        if isinstance(piece, FirstToken):
            call.timeline.mark_first_token()
        elif not isinstance(piece, PromptReady):
            piece = mint_deltas(piece, call.call_ids)
        emit(piece)

    abort = partial(placed.kind.abort, placed.replica, job)
    job.served.aborts.add(abort)
    try:
        with asked, call.scope.sampling(abort):
            return await placed.kind.sample(placed.replica, job, stream=streams, emit=mint_and_emit)
    except RequestError as error:
        if job.plan is not None and error.param == BUDGET:
            raise exhaust_total(call.session.info) from error
        raise
    finally:
        job.served.aborts.discard(abort)


async def _drop_empty(sampled: Sampled, services: Services) -> None:
    """Raise EngineFailed, and leave nothing, for a call that was cut before there was anything to record."""
    call = sampled.call
    if call.scope.cancelled and not any(each.token_ids or each.message.get("content") for each in sampled.choices):
        await services.sessions.drop_intent(call.session_id, call.call_id)
        raise EngineFailed("the call was cut before a token was sampled")


async def commit(call: Admitted, records: Sequence[Call], services: Services) -> int:
    """Store the records in one step. Returns how many the session has. Raises as `SessionStore.commit`."""
    size = sum([record.size_bytes for record in records])
    # A long text is compressed beside everybody else's calls.
    encoded = _encode_records(records) if size <= _LONG_BYTES else await asyncio.to_thread(_encode_records, records)
    created_at = call.session.info.created_at
    return await services.sessions.commit(call.session_id, call.call_id, encoded, size, created_at=created_at)


def remember(sampled: Sampled, found: Continuation, records: Sequence[Call], total: int, services: Services) -> None:
    """The call is recorded, as one of `total`: its session knows it here, too, and that the next one mostly goes on from it."""
    call, session = sampled.call, sampled.call.session
    session.add_calls(records, sampled.prompt_ids, total)
    call.draft.keep()
    keep_history(session, found)
    services.cache.weigh(session)
    if sampled.placed.plan is not None:
        session.keep_rendering(call.call_id, sampled.placed.plan.rendering)


def _encode_records(records: Sequence[Call]) -> dict[str, bytes]:
    return {record.call_id: encode(record) for record in records}


async def _check_open(call: Admitted, services: Services) -> None:
    """Raises Conflict when the session was closed, by whichever process, and NotFound when it was deleted."""
    with contextlib.suppress(StoreUnavailable):
        state = await services.sessions.load(call.session_id)
        if state is None or state.info.created_at != call.session.info.created_at:
            raise NotFound(f"session '{call.session_id}' does not exist")
        if state.status != "open":
            raise Conflict(f"session '{call.session_id}' is {state.status}; it takes no more calls")


async def count_tokens(draft: Draft, request: Request, services: Services) -> int:
    """How many tokens the request's prompt has, as the engine counts them; nothing is recorded."""
    replica = services.pool.pick(draft.session.info.session_id, request.model)
    request.engine_messages = draft.session.engine_messages(request.history)
    for hook in choose_hooks(services.hooks, draft.session.info, request).before_sampling:
        await hook(draft, request, replica)
    return await services.pool.kinds.of(replica).count(replica, request)


# A session's `sampling` (`POST /sessions`) holds two kinds of fields: parameters that override the harness's own, and what to record for
# the trainer, which no harness sees: `top_logprobs`, `prompt_logprobs`, `routed_experts`. Otherwise the settings apply.


_KEPT = ("top_logprobs", "prompt_logprobs", "routed_experts")


def want_details(placed: Placed, settings: Settings) -> tuple[Placed, WantedDetails]:
    """The details to ask the engine for; of routed experts only those of positions that no record has. The prompt is then stored on the
    call that has the others, whatever is recorded meanwhile."""
    session, plan = placed.call.session, placed.plan
    kept = {name: session.info.sampling.get(name, getattr(settings.keep, name)) for name in _KEPT}
    wanted = WantedDetails(**kept)
    if not wanted.routed_experts or plan is None:
        return placed, wanted
    where = locate(session, placed.found, plan.prompt_ids, plan.branch_reason)
    base = session.forest.calls[where.base_id].node if where.base_id is not None else None
    if base is None or base.details is None or base.details.routed_experts is None:
        return placed, wanted
    found = _replace(placed.found, base=where.base_id)
    return _replace(placed, found=found), replace(wanted, routed_from=where.base_length - 1)
