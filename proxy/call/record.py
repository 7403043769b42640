"""Make the records of a finished call, one of each choice: the node's place and tokens, which distribution they were sampled from, and what
the API later shows of it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.call.distribution import describe_sampling, find_mode
from proxy.call.labels import find_control_tokens, has_invalid_call
from proxy.call.phases import Continuation, Placed, Sampled
from proxy.call.session import Session
from proxy.dialects.base import Choice, Delta, Reply, Request, tool_call_id
from proxy.engine.apis import reply as engine
from proxy.engine.apis.first_sample import TURN_END, TURN_END_UNKNOWN
from proxy.engine.replica import Replica
from proxy.services import Services
from reconstruct.accounting import FROZEN
from reconstruct.media import Media, agreed_length, shift
from reconstruct.messages import chain, digest_message, hash_bytes, split_thought
from reconstruct.prompt import IDS_UNKNOWN
from reconstruct.records import (
    BASE_VERSIONS,
    CONTROL_TOKENS,
    INVALID_TOOL_CALL,
    MODEL,
    NO_TOKEN_IDS,
    Call,
    Ids,
    Node,
    Sampling,
    pack_ids,
    pack_logprobs,
    shared_length,
)
from reconstruct.spans import ModeSpan

_encode = msgspec.json.Encoder().encode


def build_records(sampled: Sampled, found: Continuation, choices: Sequence[Choice], services: Services) -> list[Call]:
    """The record of every choice, the first one first: the others lean on its prompt instead of repeating it.

    `found` is what the prompt's ids confirm; `choices` are the call's as the harness gets them."""
    call, placed = sampled.call, sampled.placed
    request, replica = call.request, placed.replica
    engine_seconds = call.timeline.engine_seconds
    own_seconds = max(0.0, time.perf_counter() - call.clock - engine_seconds)
    branch_reason = None if placed.plan is None else placed.plan.branch_reason
    where = locate(call.session, found, sampled.prompt_ids, branch_reason, sampled.media)
    sampling, logprob_mode = _describe_distribution(placed, services)
    messages_from = found.reply_at + 1 if found.parent is not None else 0
    messages, count = _encode(request.messages[messages_from:]), len(request.messages)
    frozen = services.pool.is_frozen(replica, request.model)
    marks = _find_marks(placed, messages_from)
    records: list[Call] = []
    for each, choice in zip(sampled.choices, choices, strict=True):
        aborted = each.finish_reason == "abort"
        node = _node(where, records[0] if records else None, each, logprob_mode)
        reason = _find_quarantine(sampled, each, frozen)
        record = Call(
            call_id=choice.call_id,
            session_id=call.session_id,
            node=node,
            dialect=request.dialect,
            api=replica.api or "chat",
            status="failed" if sampled.is_broken else "aborted" if aborted else "finished",
            role=call.purpose.role,
            agent=call.purpose.agent,
            finish_reason=each.finish_reason if aborted else choice.finish_reason,
            stop_reason=each.stop_reason,
            sampling=sampling,
            root_key=found.render_key,
            fingerprint=found.chain[-1],
            reply_fingerprint=chain(found.chain[-1], [digest_message(choice.message)])[-1],
            message_count=count,
            messages_from=messages_from,
            messages=messages,
            reply=_encode(choice.message),
            preamble=b"" if node.parent_id else _preamble(request),
            digest=call.digest,
            projection=found.projection,
            replica=replica.name,
            started_at=call.started_at,
            engine_seconds=engine_seconds,
            own_seconds=own_seconds,
            trainable=not reason,
            quarantine_reason=reason,
            marks=_label(sampled, each, choice, marks),
            role_source=call.purpose.source,
            engine_tool_call_ids=_engine_ids(each, choice),
        )
        records.append(record)
    return records


def _describe_distribution(placed: Placed, services: Services) -> tuple[Sampling, str]:
    """The parameters in effect, and what the logprobs were taken from."""
    kind, body = placed.kind, {} if placed.plan is None else placed.plan.body
    parameters = kind.parameters(placed.call.request, body, placed.sampling)
    mode = placed.replica.find_logprob_mode(services.settings.engine_logprob_modes)
    return describe_sampling(parameters), find_mode(parameters, mode, kind.leaves_raw)


def _label(sampled: Sampled, each: engine.EngineChoice, choice: Choice, marks: Mapping[str, str]) -> Mapping[str, str]:
    """The marks of one choice, beside those of the call."""
    own = dict(sampled.marks.get(each.index, {}))
    if each.base_spans:
        own[BASE_VERSIONS] = _encode([(span.version, span.start, span.end) for span in each.base_spans]).decode()
    if has_invalid_call(sampled.call.request, choice.message, choice.finish_reason, each.text):
        own[INVALID_TOOL_CALL] = "true"
    return {**marks, **own} if own else marks


def _engine_ids(sampled: engine.EngineChoice, choice: Choice) -> tuple[str, ...]:
    """The ids under which the engine is to see the choice's tool calls: its own, and where it gave none, one of nine letters and digits,
    which the strictest templates (Mistral's) take, and which no other call of the session has."""
    if not choice.message.get("tool_calls"):
        return ()
    pairs = zip(sampled.message["tool_calls"], choice.message["tool_calls"], strict=True)
    return tuple(own.get("id") or hash_bytes(minted["id"].encode()).hex()[:9] for own, minted in pairs)


def warn_of_renderings(replica: Replica, calls: Sequence[Call], choices: Sequence[Choice]) -> None:
    """Note what makes calls of this replica branch that another configuration of the engine would let continue."""
    for call, choice in zip(calls, choices, strict=True):
        if call.node.branch_reason == "turn_end_unknown":
            replica.note(TURN_END, TURN_END_UNKNOWN)
        if "thinking" not in replica.notes and split_thought(choice.message) is not None:
            replica.note(
                "thinking",
                "leaves the model's thinking in the content of its replies: start vLLM with --reasoning-parser (with one, the model "
                "thinks although the call turned thinking off). Where the chat template hides that thinking from later turns, they "
                "branch (thinking_dropped), or keep it with VERBATIM_THINKING=retain",
            )


@dataclass(frozen=True, slots=True)
class TreePosition:
    """Where a prompt hangs in the forest: see reconstruct.records.Node."""

    parent_id: str | None
    branch_reason: str | None
    base_id: str | None
    base_length: int
    delta_ids: Ids
    media: tuple[Media, ...] = ()


def locate(
    session: Session, found: Continuation, prompt_ids: Ids | None, branch_reason: str | None, media: tuple[Media, ...] = ()
) -> TreePosition:
    """Where `prompt_ids` (None: not known) with their `media` hang: on the parent where they begin with all of its ids, else on the call
    that probably shares most.

    `branch_reason` is why the prompt is a fresh rendering, None when it was made to extend the parent. It is the place's where the
    prompt does not extend the parent.
    """
    parent_id = found.parent.call_id if found.parent else None
    if prompt_ids is None:
        return TreePosition(
            parent_id, _root_reason(session, found) if parent_id is None else IDS_UNKNOWN, None, 0, pack_ids(())
        )
    base = _nearest_known(session, parent_id or found.nearest or found.base or next(reversed(session.forest.calls), None))
    known = session.known_ids(base) if base is not None else None
    shared = shared_length(known, prompt_ids) if known is not None else 0
    if base is not None and (media or session.forest.has_media):
        shared = agreed_length(shared, session.forest.media(base), media)
    if parent_id is None:
        reason = _root_reason(session, found)
    elif base != parent_id:
        reason = branch_reason or IDS_UNKNOWN
    elif shared < session.forest.full_length(parent_id):
        reason = branch_reason or "retokenized"
    else:
        # Also where nothing proved it beforehand: a fresh rendering may begin with all of the parent's ids.
        reason = _fork_reason(session, found, parent_id)
    own = shift((each for each in media if each.start >= shared), -shared) if media else ()
    return TreePosition(parent_id, reason, base if shared else None, shared, prompt_ids[shared:], own)


def _nearest_known(session: Session, call_id: str | None) -> str | None:
    """The call, or the first of its ancestors whose ids are known."""
    calls = session.forest.calls
    while call_id is not None and not calls[call_id].ids_known:
        call_id = calls[call_id].node.parent_id
    return call_id


def _fork_reason(session: Session, found: Continuation, parent_id: str) -> str | None:
    """Why a call that extends its parent is not the first to do so."""
    if _is_repeat(session, found, parent_id):
        return "repeated"
    if _is_edited(found):
        return "edited"
    return "forked" if session.forest.children(parent_id) else None


def _root_reason(session: Session, found: Continuation) -> str | None:
    if not len(session.forest):
        return None
    if _is_repeated(found) or _is_repeat(session, found, None):
        return "repeated"
    return "edited" if _is_edited(found) else "new_root"


def _is_repeated(found: Continuation) -> bool:
    return found.nearest is not None and found.shared_messages == len(found.chain) - 1


def _is_edited(found: Continuation) -> bool:
    return found.nearest is not None and not _is_repeated(found) and found.shared_messages > found.reply_at + 1


def _is_repeat(session: Session, found: Continuation, parent_id: str | None) -> bool:
    """Whether the same request stands below the same parent by now: its twin may have been recorded while this one was sampled."""
    for call_id in reversed(session.forest.find_by_prompt(found.chain[-1])):
        # The chain leaves reasoning out: a request of the same fingerprint below another parent is of an edited history.
        call = session.forest.calls[call_id]
        if call.node.parent_id == parent_id and call.root_key == found.render_key:
            return True
    return False


def _find_marks(placed: Placed, messages_from: int) -> Mapping[str, str]:
    """What the harness said of the call, who sampled it, and the control tokens in its new messages."""
    call, found = placed.call, placed.found
    marks, request = call.marks, call.request
    if found.parent is not None and call.session.model(found.parent.call_id) != request.model:
        marks = {**marks, MODEL: request.model}
    if placed.replica.policy:
        marks = {**marks, "policy": placed.replica.policy}
    if not call.planner.forges_tokens or (placed.plan is not None and placed.plan.keeps_text_apart):
        return marks
    controls = find_control_tokens(request.messages[messages_from:], () if messages_from else request.tools)
    return {**marks, CONTROL_TOKENS: _encode(controls).decode()} if controls else marks


def _find_quarantine(sampled: Sampled, each: engine.EngineChoice, frozen: bool) -> str:
    """Why the choice is not to be trained, "" where it is."""
    if sampled.prompt_ids is None or each.token_ids is None:
        return NO_TOKEN_IDS
    if sampled.placeholders and not {*each.token_ids}.isdisjoint(sampled.placeholders):
        # Whoever computes logprobs from pixels would look for an image behind it.
        return "placeholder_sampled"
    return sampled.reasons.get(each.index) or (FROZEN if frozen else "")


def _node(where: TreePosition, sibling: Call | None, sampled: engine.EngineChoice, logprob_mode: str) -> Node:
    base_id, base_length, delta_ids, media = where.base_id, where.base_length, pack_ids(where.delta_ids), where.media
    if sibling is not None:
        base_id, base_length = sibling.call_id, where.base_length + len(where.delta_ids)
        delta_ids, media = pack_ids(()), ()
    return Node(
        parent_id=where.parent_id,
        branch_reason=where.branch_reason,
        base_id=base_id,
        base_length=base_length,
        delta_ids=delta_ids,
        completion_ids=pack_ids(sampled.token_ids or ()),
        logprobs=pack_logprobs(sampled.logprobs),
        spans=sampled.spans,
        modes=(ModeSpan(logprob_mode, 0, len(sampled.token_ids)),) if sampled.token_ids else (),
        details=sampled.details and sampled.details.cut_to_delta(base_length, len(delta_ids)),
        media=media,
    )


def _preamble(request: Request) -> bytes:
    return _encode({"model": request.model, "tools": request.tools, "template_kwargs": request.template_kwargs})


def mint_deltas(deltas: Sequence[Delta], call_ids: Sequence[str]) -> Sequence[Delta]:
    """The deltas as the harness gets them: each carries one thing, and tool-call ids name its call, also where the engine gave none.
    `call_ids` holds one per choice."""
    minted: list[Delta] = []
    for delta in deltas:
        if delta.tool_calls:
            delta.tool_calls = [_mint_call(call, call_ids[delta.index]) for call in delta.tool_calls]
            minted += delta.split()
        elif delta.content and delta.reasoning:
            minted += delta.split()
        else:
            minted.append(delta)
    return minted


def _mint_call(call: Mapping[str, Any], call_id: str) -> Mapping[str, Any]:
    if call.get("id") or engine.names_function(call):
        return {**call, "id": tool_call_id(call_id, call.get("index", 0))}
    return call


def mint_choices(sampled: Sampled) -> list[Choice]:
    """The choices as the harness gets them: ids minted, finish reasons in the chat words. A tool that the request forced by name
    ends with "stop"; a reply the engine cut short reads as cut by length."""
    forced = isinstance(sampled.call.request.forward.get("tool_choice"), dict)
    return [_mint_choice(each, sampled.call.call_ids[each.index], forced_tool=forced) for each in sampled.choices]


def _mint_choice(sampled: engine.EngineChoice, call_id: str, *, forced_tool: bool) -> Choice:
    message = dict(sampled.message)
    calls = message.get("tool_calls")
    if calls:
        message["tool_calls"] = [{**call, "id": tool_call_id(call_id, at)} for at, call in enumerate(calls)]
    finish_reason = sampled.finish_reason
    if calls and finish_reason == "stop" and not forced_tool:
        finish_reason = "tool_calls"
    if finish_reason == "abort":
        finish_reason = "length"
    tokens = len(sampled.token_ids or ())
    return Choice(
        sampled.index,
        call_id,
        message,
        finish_reason,
        tokens,
        logprobs=sampled.logprob_content,
        stop_reason=sampled.stop_reason,
        token_ids=sampled.token_ids or (),
    )


def build_reply(sampled: Sampled, choices: list[Choice]) -> Reply:
    """The reply with these of the call's choices."""
    call, prompt_ids = sampled.call, sampled.prompt_ids
    tokens = sampled.prompt_tokens or (0 if prompt_ids is None else len(prompt_ids))
    reply = Reply(call.call_id, call.request.model, int(call.started_at), tokens, choices, sampled.cached_tokens)
    if call.request.wants_ids and prompt_ids is not None:
        reply.prompt_ids = prompt_ids.tolist()
    if len(choices) == len(sampled.choices):
        # Of candidates that are not shown the engine counts the tokens too.
        reply.counted_tokens = sampled.completion_tokens
    return reply
