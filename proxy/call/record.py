"""Make the records of a finished call, one of each choice: the node's place and tokens, and what the API later shows of it."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.call.tree import SessionTree
from proxy.call.turn import Continuation, Planned, Sampled
from proxy.dialects.base import Choice, Delta, Request, tool_call_id
from proxy.dialects.fields import NOTED, UNPARSED, accepts, arguments_object
from proxy.engine.apis import reply as engine
from proxy.engine.replica import Replica
from reconstruct.accounting import FROZEN
from reconstruct.media import Media, agreed_length, shift
from reconstruct.messages import chain, digest_message, hash_bytes, split_thought
from reconstruct.prompt import IDS_UNKNOWN
from reconstruct.records import (
    CHOSEN,
    CONTROL_TOKENS,
    INVALID_TOOL_CALL,
    LOOKAHEAD,
    MODEL,
    NO_TOKEN_IDS,
    NOT_CHOSEN,
    Call,
    Ids,
    Node,
    Sampling,
    pack_ids,
    pack_logprobs,
    shared_length,
)

_encode = msgspec.json.Encoder().encode


_NEUTRAL: Mapping[str, Any] = {"min_p": 0.0, "presence_penalty": 0.0, "frequency_penalty": 0.0, "repetition_penalty": 1.0}
"""Values of what is noted that bend nothing: they are left out."""


def effective_sampling(asked: Mapping[str, Any], generate_body: Mapping[str, Any] | None, logprob_mode: str) -> Sampling:
    """What was in effect: on the token path the engine's own parameters under ours, on the chat path what was sent."""
    engine = (generate_body or {}).get("sampling_params") or {}
    effective = {**engine, **asked}
    stop = effective.get("stop") or ()
    extra = {key: effective[key] for key in NOTED if effective.get(key) not in (None, _NEUTRAL.get(key))}
    return Sampling(
        temperature=effective.get("temperature"),
        top_p=effective.get("top_p"),
        top_k=effective.get("top_k"),
        seed=effective.get("seed"),
        max_tokens=effective.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        logprob_mode=logprob_mode,
        extra=extra,
    )


def call_records(
    sampled: Sampled, found: Continuation, choices: Sequence[Choice], *, frozen: bool, logprob_mode: str
) -> list[Call]:
    """The record of every choice, the first one first: the others lean on its prompt instead of repeating it.

    `found` is what the prompt's ids confirm; `choices` are the outcome's as the harness gets them. `frozen`: what was sampled is never
    trained. `logprob_mode`: the engine's."""
    planned, outcome = sampled.planned, sampled.outcome
    turn, plan = planned.turn, planned.plan
    engine_seconds = turn.timeline.engine_seconds
    own_seconds = max(0.0, time.perf_counter() - turn.clock - engine_seconds)
    where = place(turn.tree, found, sampled.prompt_ids, sampled.branch_reason, sampled.media)
    asked = {**turn.request.forward, **planned.sampling}
    sampling = effective_sampling(asked, plan.body if plan else None, logprob_mode)
    messages_from = found.reply_at + 1 if found.parent is not None else 0
    messages = _encode(turn.request.messages[messages_from:])
    all_marks = _marks(planned, messages_from)
    calls: list[Call] = []
    for each, choice in zip(outcome.choices, choices, strict=True):
        node = _node(where, calls[0] if calls else None, each)
        quarantine_reason = _quarantine_reason(sampled, each, frozen)
        marks = (
            all_marks
            if turn.lookahead is None
            else {**all_marks, LOOKAHEAD: CHOSEN if _is_shown(sampled, each) else NOT_CHOSEN}
        )
        aborted = each.finish_reason == "abort"
        invalid = has_invalid_call(turn.request, choice.message, choice.finish_reason, each.text)
        calls.append(
            Call(
                call_id=choice.call_id,
                session_id=turn.session_id,
                node=node,
                dialect=turn.request.dialect,
                api=planned.replica.api or "chat",
                status="failed" if outcome.broken is not None else "aborted" if aborted else "finished",
                role=turn.purpose.role,
                agent=turn.purpose.agent,
                finish_reason=each.finish_reason if aborted else choice.finish_reason,
                stop_reason=each.stop_reason,
                sampling=sampling,
                root_key=found.dress,
                fingerprint=found.fingerprint,
                reply_fingerprint=chain(found.fingerprint, [digest_message(choice.message)])[-1],
                message_count=len(turn.request.messages),
                messages_from=messages_from,
                messages=messages,
                reply=_encode(choice.message),
                preamble=b"" if node.parent_id else _preamble(turn.request),
                digest=turn.digest,
                projection=found.projection,
                replica=planned.replica.name,
                started_at=turn.started_at,
                engine_seconds=engine_seconds,
                own_seconds=own_seconds,
                trainable=not quarantine_reason,
                quarantine_reason=quarantine_reason,
                marks={**marks, INVALID_TOOL_CALL: "true"} if invalid else marks,
                role_source=turn.purpose.source,
                engine_tool_call_ids=_engine_ids(each, choice),
            )
        )
    return calls


def _engine_ids(sampled: engine.Sampled, choice: Choice) -> tuple[str, ...]:
    """The ids under which the engine is to see the choice's tool calls: its own, and where it gave none, one of nine letters and digits,
    which the strictest templates (Mistral's) take, and which no other call of the session has."""
    given = (call.get("id") for call in sampled.message.get("tool_calls") or ())
    minted = (call["id"] for call in choice.message.get("tool_calls") or ())
    return tuple(own or hash_bytes(one.encode()).hex()[:9] for own, one in zip(given, minted, strict=True))


def warn_of_renderings(replica: Replica, calls: Sequence[Call], choices: Sequence[Choice]) -> None:
    """Say once what makes calls of this replica branch that another configuration of the engine would let continue."""
    if any(call.node.branch_reason == "turn_end_unknown" for call in calls):
        replica.warn_once(
            "turn_end_unknown",
            "renders no dialogue from which the end of a turn can be read: calls whose sampled ids the chat template would write "
            "otherwise branch (turn_end_unknown), a row each",
        )
    if "thinking" not in replica.warned and any(split_thought(choice.message) is not None for choice in choices):
        replica.warn_once(
            "thinking",
            "leaves the model's thinking in the content of its replies: start vLLM with --reasoning-parser. Where the chat template "
            "hides that thinking from later turns, they branch (thinking_dropped), or keep it with VERBATIM_THINKING=retain",
        )


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt hangs in the forest: see reconstruct.records.Node."""

    parent_id: str | None
    branch_reason: str | None
    base_id: str | None
    base_length: int
    delta_ids: Ids
    media: tuple[Media, ...] = ()


def place(
    tree: SessionTree, found: Continuation, prompt_ids: Ids | None, branch_reason: str | None, media: tuple[Media, ...] = ()
) -> Place:
    """Where `prompt_ids` (None: not known) with their `media` hang: on the parent where they begin with all of its ids, else on the call
    that probably shares most.

    `branch_reason` is why the prompt is a fresh rendering, None when it was made to extend the parent. It is the place's where the
    prompt does not extend the parent.
    """
    parent_id = found.parent.call_id if found.parent else None
    if prompt_ids is None:
        return Place(parent_id, _root_reason(tree, found) if parent_id is None else IDS_UNKNOWN, None, 0, pack_ids(()))
    base = _nearest_known(tree, parent_id or found.near or found.base or next(reversed(tree.forest.calls), None))
    known = tree.known_ids(base) if base is not None else None
    shared = shared_length(known, prompt_ids) if known is not None else 0
    if base is not None and (media or tree.forest.has_media):
        shared = agreed_length(shared, tree.forest.media(base), media)
    if parent_id is None:
        reason = _root_reason(tree, found)
    elif base != parent_id:
        reason = branch_reason or IDS_UNKNOWN
    elif shared < tree.forest.full_length(parent_id):
        reason = branch_reason or "retokenized"
    else:
        # Also where nothing proved it beforehand: a fresh rendering may begin with all of the parent's ids.
        reason = _fork_reason(tree, found, parent_id)
    own = shift((each for each in media if each.start >= shared), -shared) if media else ()
    return Place(parent_id, reason, base if shared else None, shared, prompt_ids[shared:], own)


def _nearest_known(tree: SessionTree, call_id: str | None) -> str | None:
    """The call, or the first of its ancestors whose ids are known."""
    return next((call.call_id for call in tree.forest.lineage(call_id) if call.ids_known), None)


def _fork_reason(tree: SessionTree, found: Continuation, parent_id: str) -> str | None:
    """Why a call that extends its parent is not the first to do so."""
    if _asked_before(tree, found, parent_id):
        return "repeated"
    if found.edited:
        return "edited"
    return "forked" if tree.forest.children(parent_id) else None


def _root_reason(tree: SessionTree, found: Continuation) -> str | None:
    if not len(tree.forest):
        return None
    if found.repeated or _asked_before(tree, found, None):
        return "repeated"
    return "edited" if found.edited else "new_root"


def _asked_before(tree: SessionTree, found: Continuation, parent_id: str | None) -> bool:
    """Whether the same request stands below the same parent by now: its twin may have been recorded while this one was sampled."""
    asked = (tree.forest.calls[call_id] for call_id in reversed(tree.forest.find_by_prompt(found.fingerprint)))
    # The chain leaves reasoning out: a request of the same fingerprint below another parent is of an edited history.
    return any(call.node.parent_id == parent_id and call.root_key == found.dress for call in asked)


def _marks(planned: Planned, messages_from: int) -> Mapping[str, str]:
    """What the harness said of the call, who sampled it, and the control tokens in its new messages."""
    marks, request, found = planned.turn.marks, planned.turn.request, planned.found
    if found.parent is not None and planned.turn.tree.model(found.parent.call_id) != request.model:
        marks = {**marks, MODEL: request.model}
    if planned.replica.policy:
        marks = {**marks, "policy": planned.replica.policy}
    if request.prompt is not None or (planned.plan is not None and planned.plan.keeps_text_apart):
        # A prompt is written with its control tokens, and what is read as text forges nothing.
        return marks
    controls = control_tokens(request.messages[messages_from:], () if messages_from else request.tools)
    return {**marks, CONTROL_TOKENS: _encode(controls).decode()} if controls else marks


def _quarantine_reason(call: Sampled, sampled: engine.Sampled, frozen: bool) -> str:
    """Why the choice is not to be trained, "" where it is."""
    if call.prompt_ids is None or sampled.token_ids is None:
        return NO_TOKEN_IDS
    if call.media and not {*sampled.token_ids}.isdisjoint(call.placeholders):
        # Whoever computes logprobs from pixels would look for an image behind it.
        return "placeholder_sampled"
    if not _is_shown(call, sampled) and call.outcome.broken is None:
        return NOT_CHOSEN
    return FROZEN if frozen else ""


def _is_shown(call: Sampled, sampled: engine.Sampled) -> bool:
    """Whether the choice is one for the harness."""
    return call.planned.turn.lookahead is None or (call.chosen and sampled.index == 0)


def _node(where: Place, sibling: Call | None, sampled: engine.Sampled) -> Node:
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
        details=sampled.details and sampled.details.cut_to_delta(base_length, len(delta_ids)),
        media=media,
    )


def _preamble(request: Request) -> bytes:
    return _encode({"model": request.model, "tools": request.tools, "template_kwargs": request.template_kwargs})


def minted_delta(delta: Delta, call_ids: Sequence[str]) -> Delta:
    """The delta with tool-call ids that name its call, also where the engine gave none; `call_ids` holds one per choice."""
    if delta.tool_calls:
        call_id = call_ids[delta.index]
        delta.tool_calls = [
            {**call, "id": tool_call_id(call_id, call.get("index", 0))}
            if call.get("id") or engine.names_function(call)
            else call
            for call in delta.tool_calls
        ]
    return delta


def minted_choice(sampled: engine.Sampled, call_ids: Sequence[str], *, forced_tool: bool) -> Choice:
    """The choice as the harness gets it: ids minted, finish reason in the chat words. A tool that the request forced by name
    ends with "stop"; a reply the engine cut short reads as cut by length."""
    call_id = call_ids[sampled.index]
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


# Tool calls of a reply, judged against the tools that were offered, and by what the model sampled.
#
# An engine's parser delivers a call that the model never finished as a whole one without arguments, or drops the markup that shows it. So a
# call must be what it claims to be, a call of an offered tool with arguments that its schema accepts, and what the model opened it must
# have closed. The verdict is a label for trainers; it does not change what is trained.


_MARKUP = (
    *(("<tool_call>", "</tool_call>"), ("<tool_calls>", "</tool_calls>"), ("<function=", "</function>")),
    *(
        ("<function_calls>", "</function_calls>"),
        ("<minimax:tool_call>", "</minimax:tool_call>"),
        ("<seed:tool_call>", "</seed:tool_call>"),
    ),
    *(
        ("<|tool_call|>", ""),
        ("<|tool_call>", "<tool_call|>"),
        ("[TOOL_CALLS]", ""),
        ("<|python_tag|>", ""),
        ("functools[", "]"),
    ),
    *(("<|action_start|>", "<|action_end|>"), ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    *(("<|tool_call_begin|>", "<|tool_call_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")),
    *(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),  # noqa: RUF001
    *(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),  # noqa: RUF001
)
"""How a tool call begins and ends in the formats that vLLM 0.32 and SGLang parse (vllm/tool_parsers); "" where its arguments end it."""


def has_invalid_call(request: Request, message: Mapping[str, Any], finish_reason: str, sampled: str | None = None) -> bool:
    """Whether the model meant to call a tool and its call is not one, or not whole: the engine's parser left it in the text; its tool was
    not offered; its arguments are no JSON object, or lack a required property, or have one of another type than their schema's; or
    the `sampled` text (None: not known) opens a call that it does not close. A truncated reply has none."""
    if not request.offers_calls or finish_reason not in ("stop", "tool_calls"):
        return False
    calls = message.get("tool_calls") or ()
    if not all(_is_accepted(request.schemas, call["function"]) for call in calls):
        return True
    content = message.get("content")
    if isinstance(content, str) and any(opener in content for opener, _ in _MARKUP):
        return True
    return sampled is not None and _is_unfinished(sampled, len(calls))


def _is_accepted(schemas: Mapping[str, Any], function: Mapping[str, Any]) -> bool:
    if function.get("name") not in schemas:
        return False
    given = arguments_object(function["arguments"])
    return UNPARSED not in given and accepts(schemas[function["name"]], given)


def _is_unfinished(sampled: str, calls: int) -> bool:
    """Whether the text opens more calls than it closes, or opens some of which the parser made none."""
    for opener, closer in _MARKUP:
        opened = sampled.count(opener)
        if opened and (not calls or (closer and opened > sampled.count(closer))):
            return True
    return False


# Control tokens in text: what opens and closes turns for a chat template, but written by a user, a tool or an agent.
#
# An engine renders the messages to one text and tokenizes it, so `<|im_end|>` inside a message becomes the same id as the end of that
# message: whoever writes a tool's output can close the turn and open another under any role. No supported engine keeps message text
# apart when it renders (vLLM 0.32 has no option for it in render or tokenize), only the service's own renderer does (chat_format.py).
# The recorded ids are what the model saw; the call and its rows are marked.


_MOST = 16
"""Different ones that are kept of a call."""

_CONTROL = re.compile(
    r"<\|[^<>|\s]{1,64}\|>"  # ChatML, Llama 3, harmony, GLM, Phi
    "|<\uff5c[^<>\uff5c]{1,64}\uff5c>"  # DeepSeek
    r"|</?s>|<</?SYS>>|\[/?(?:INST|SYSTEM_PROMPT|AVAILABLE_TOOLS|TOOL_CALLS|TOOL_RESULTS|TOOL_CONTENT|THINK|ARGS|CALL_ID)\]"  # Mistral
    r"|<(?:bos|eos|pad|start_of_turn|end_of_turn)>|<\|(?:turn|channel|tool)>|<(?:turn|channel|tool)\|>"  # Gemma
    r"|\[gMASK\]|<sop>"  # GLM
)
_PIECES = (
    *("<|", "|>", "<\uff5c", "<s>", "</s>", "SYS>>", "_turn>", "<bos>", "<eos>", "<pad>", "<sop>"),
    *("INST]", "PROMPT]", "TOOLS]", "CALLS]", "RESULTS]", "CONTENT]", "THINK]", "ARGS]", "_ID]", "MASK]"),
)
"""A text with none of these holds none of those, which is seen many times faster."""

_FIELDS = ("tool_calls", "name", "reasoning_content", "reasoning", "tool_call_id")


def control_tokens(messages: Iterable[Mapping[str, Any]], tools: Sequence[Any] = ()) -> tuple[str, ...]:
    """Those that texts of the messages and tools hold, sorted, each once and `_MOST` at most. Text parts are looked at as
    templates put them together: one after the other."""
    found: set[str] = set()
    if tools:
        _look(_encode(tools).decode(), found)
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(map(_text, content))
        if content and isinstance(content, str):
            _look(content, found)
        # Beside its role and content: most messages have no more.
        if len(message) > 2:
            _look("\0".join(_said(message.get(name)) for name in _FIELDS), found)
    return tuple(sorted(found)[:_MOST]) if found else ()


def _look(text: str, found: set[str]) -> None:
    if ("<" in text or "]" in text) and any(piece in text for piece in _PIECES):
        found.update(_CONTROL.findall(text))


def _said(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode() if value else ""


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else "\n"
