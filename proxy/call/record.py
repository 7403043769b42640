"""Make the records of a finished call, one of each choice: the node's place and tokens, which distribution they were sampled from, and what
the API later shows of it."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import msgpack
import msgspec

from proxy.call.phases import Continuation, Placed, Sampled
from proxy.call.session import Session
from proxy.dialects.base import Choice, Delta, Reply, Request, tool_call_id
from proxy.dialects.fields import UNPARSED, accepts, arguments_object
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
    LOGITS,
    MASKED,
    MODEL,
    NO_TOKEN_IDS,
    PROCESSED,
    RAW,
    UNKNOWN_MODE,
    Call,
    Ids,
    ModeSpan,
    Node,
    Sampling,
    pack_ids,
    pack_logprobs,
    shared_length,
)

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
    given = (call.get("id") for call in sampled.message.get("tool_calls") or ())
    minted = (call["id"] for call in choice.message.get("tool_calls") or ())
    return tuple(own or hash_bytes(one.encode()).hex()[:9] for own, one in zip(given, minted, strict=True))


def warn_of_renderings(replica: Replica, calls: Sequence[Call], choices: Sequence[Choice]) -> None:
    """Note what makes calls of this replica branch that another configuration of the engine would let continue."""
    if any(call.node.branch_reason == "turn_end_unknown" for call in calls):
        replica.note(TURN_END, TURN_END_UNKNOWN)
    if "thinking" not in replica.notes and any(split_thought(choice.message) is not None for choice in choices):
        replica.note(
            "thinking",
            "leaves the model's thinking in the content of its replies: start vLLM with --reasoning-parser (with one, the model thinks "
            "although the call turned thinking off). Where the chat template hides that thinking from later turns, they branch "
            "(thinking_dropped), or keep it with VERBATIM_THINKING=retain",
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
    return next((call.call_id for call in session.forest.lineage(call_id) if call.ids_known), None)


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
    asked = (session.forest.calls[call_id] for call_id in reversed(session.forest.find_by_prompt(found.chain[-1])))
    # The chain leaves reasoning out: a request of the same fingerprint below another parent is of an edited history.
    return any(call.node.parent_id == parent_id and call.root_key == found.render_key for call in asked)


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
    controls = control_tokens(request.messages[messages_from:], () if messages_from else request.tools)
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
        ("<|tools_prefix|>", "<|tools_suffix|>"),
        ("<longcat_tool_call>", "</longcat_tool_call>"),
    ),
    *(("<|action_start|>", "<|action_end|>"), ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")),
    *(("<|tool_call_begin|>", "<|tool_call_end|>"), ("<|tool_call_start|>", "<|tool_call_end|>")),
    *(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"), ("<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>")),  # noqa: RUF001
    *(("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"), ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>")),  # noqa: RUF001
)
"""How a tool call begins and ends in the formats that vLLM 0.32 and SGLang parse (vllm/tool_parsers); "" where whole JSON ends it."""
_ARGUMENTS = re.compile(r"\{|\[\s*[\{\]]")


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
        if opened and (not calls or not (opened <= sampled.count(closer) if closer else _has_arguments(sampled, opener))):
            return True
    return False


def _has_arguments(sampled: str, opener: str) -> bool:
    """Whether whole JSON follows the last opener."""
    begun = _ARGUMENTS.search(sampled, sampled.rindex(opener) + len(opener))
    if begun is None:
        return False
    try:
        json.JSONDecoder().raw_decode(sampled, begun.start())
    except ValueError:
        return False
    return True


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
            _look("\0".join(_as_text(message.get(name)) for name in _FIELDS), found)
    return tuple(sorted(found)[:_MOST]) if found else ()


def _look(text: str, found: set[str]) -> None:
    if ("<" in text or "]" in text) and any(piece in text for piece in _PIECES):
        found.update(_CONTROL.findall(text))


def _as_text(value: Any) -> str:
    return value if isinstance(value, str) else _encode(value).decode() if value else ""


def _text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else "\n"


# Which distribution: what bent the choice of a call's tokens, and what its logprobs were taken from.
#
# Both are derived by exclusion from the parameters in effect (`EngineKind.parameters`): whatever is not known to bend nothing is noted, and
# whatever is not known to leave raw logprobs raw makes their mode unknown. The request alone is no proof: vLLM turns a forced tool, a tool
# with `"strict": true` and, for some tool parsers, every request with tools into a grammar.
#
# vLLM 0.32 masks logits by a grammar before it takes any logprob; all other processors come after the raw ones are taken and before the
# processed ones (v1/sample/sampler.py). Measured against transformers: under a grammar raw logprobs are off by 6 to 12, under bias, allowed
# ids, bad words and penalties by less than 1e-5.


_OF_SAMPLING = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop")
"""Parameters with a field of their own in Sampling."""

_DEFAULTS: Mapping[str, tuple[Any, ...]] = {
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "ignore_eos": (False,),
    "watermarking": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Values of parameters that bend something otherwise, with which they bend nothing. None never does."""

_NEUTRAL = frozenset(
    # How a reply ends, without a token being kept from the model or forced on it.
    {"stop_token_ids", "include_stop_str_in_output"}
    # What is returned, and how it is spelled and scheduled.
    | {"n", "logprobs", "top_logprobs", "prompt_logprobs", "prompt_logprob_start", "prompt_logprob_token_ids"}
    | {"logprob_token_ids", "flat_logprobs", "detokenize", "skip_special_tokens", "spaces_between_special_tokens"}
    | {"output_kind", "stream_interval", "skip_clone", "output_text_buffer_length", "skip_reading_prefix_cache"}
    | {"routed_experts_prompt_start", "priority", "include_reasoning", "parallel_tool_calls", "cache_salt"}
    | {"prompt_cache_key", "prompt_cache_retention", "safety_identifier"}
    # What shapes the prompt, whose ids are recorded.
    | {"tools", "reasoning_effort", "verbosity", "chat_template", "documents", "mm_processor_kwargs", "media_io_kwargs"}
    | {"add_special_tokens"}
)
"""Parameters that bend nothing, whatever their value."""

_TRANSFERRED = frozenset({"kv_transfer_params", "ec_transfer_params"})
"""What vLLM itself puts into `extra_args`, which otherwise is for logits processors of an operator's."""

_GRAMMARS = frozenset({"structured_outputs", "response_format", "tool_choice"})
"""Parameters by which an engine masks tokens before it takes a logprob. The last two are those of a chat engine, which does not say what it
makes of them."""

_REWEIGHTS = frozenset({"min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias", "ignore_eos"})
"""What processed logprobs contain without a token being masked by it, truncation aside."""

_MOST_BYTES = 2048
"""A longer value is noted by its digest: the grammar of many tools would be stored with every call."""


def describe_sampling(parameters: Mapping[str, Any]) -> Sampling:
    """The parameters in effect. `extra` has all that may have bent the choice of a token and has no field of its own."""
    stop = parameters.get("stop") or ()
    return Sampling(
        temperature=parameters.get("temperature"),
        top_p=parameters.get("top_p"),
        top_k=parameters.get("top_k"),
        seed=parameters.get("seed"),
        max_tokens=parameters.get("max_tokens"),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        extra={name: _note(value) for name, value in _find_bending(parameters).items()},
    )


def find_mode(parameters: Mapping[str, Any], engine_mode: str, leaves_raw: Set[str]) -> str:
    """What the logprobs of a call with these parameters were taken from; see `reconstruct.records.LOGPROB_MODES`.

    `engine_mode` is vLLM's `--logprobs-mode`, or another text if it is not known; `leaves_raw` is the engine kind's."""
    if engine_mode in engine.NO_LOGPROBS:
        return LOGITS
    bending = _find_bending(parameters).keys()
    if bending & _GRAMMARS or _has_strict_tool(parameters):
        return MASKED
    # An engine that does not say what it makes of tools may make a grammar of them.
    if parameters.get("tools") or not bending <= leaves_raw:
        return UNKNOWN_MODE
    if engine_mode == "processed_logprobs":
        return PROCESSED if bending <= _REWEIGHTS else MASKED
    return RAW if engine_mode == "raw_logprobs" else UNKNOWN_MODE


def _find_bending(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Those that are not known to bend nothing, and have no field of their own."""
    found = {
        name: value
        for name, value in parameters.items()
        if value is not None and name not in _OF_SAMPLING and name not in _NEUTRAL and value not in _DEFAULTS.get(name, ())
    }
    extra = found.get("extra_args")
    if isinstance(extra, Mapping) and extra.keys() <= _TRANSFERRED:
        del found["extra_args"]
    return found


def _has_strict_tool(parameters: Mapping[str, Any]) -> bool:
    """Whether a chat engine was offered a tool whose arguments must follow their schema. (Offered any, it may use a grammar: unknown.)"""
    functions = [tool.get("function") for tool in parameters.get("tools") or () if isinstance(tool, Mapping)]
    return any(isinstance(function, Mapping) and function.get("strict") is True for function in functions)


def _note(value: Any) -> Any:
    """The value as a record holds it, without what is off in it; by its digest if it is long."""
    if isinstance(value, Mapping):
        value = {str(name): item for name, item in value.items() if item is not None and item is not False}
    text = json.dumps(value, sort_keys=True, default=str).encode()
    try:
        if len(text) <= _MOST_BYTES and msgpack.packb(value):
            return value
    except (TypeError, ValueError, OverflowError):
        # Such as an integer of more than 64 bits.
        pass
    return {"bytes": len(text), "sha256": hashlib.sha256(text).hexdigest()}
