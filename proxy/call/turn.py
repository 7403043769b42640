"""One call in phases: Turn (admitted), Planned (at a replica, with its parent and prompt), Sampled (with the engine's outcome).

Each phase is a frozen type that has all the next step needs. Between them stands the plan: `continuation` looks the request up in the
session's forest, by the ids minted into the last assistant message's tool calls, then by the fingerprint chain; `plan_tokens` makes the
prompt for the token path, the parent's ids and a proven bridge, or a fresh rendering with the reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.call.recording import Recalled
from proxy.call.session import Chained, Draft, ReplayedHistory, Session
from proxy.dialects.base import HistoryMessage, Request
from proxy.dialects.catalogue import dialects
from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.renderer import Rendered
from proxy.engine.apis.reply import EngineReply
from proxy.engine.replica import Replica
from proxy.errors import ContextTooLong, RequestError
from proxy.store.states import NO_SHARE, Lookahead, Share
from proxy.timeline import CancelScope, Timeline
from reconstruct.media import Media, Ranges, find_placeholders, name_ranges
from reconstruct.messages import TURN_END, Message, declare, dress, name_calls, plain_content
from reconstruct.prompt import Parent, Prompt, Rendering, plan
from reconstruct.records import Call, Ids, order_key, pack_ids, shared_length
from reconstruct.roles import Marks, Purpose

_RENDERED = ("reasoning_effort", "chat_template", "documents")
"""Fields of a chat body that the template may look at, beside its kwargs: under other values a history may read otherwise."""

_MOST_COMPARED = 32
"""Calls of one request, the newest first, that a reply without an id is compared with: a request may be sampled ten thousand times."""

Render = Callable[[Rendering], Coroutine[Any, Any, Rendered]]


@dataclass(frozen=True, slots=True)
class Turn:
    """A call that was admitted. `started_at` is wall-clock time, `clock` the monotonic time of the same moment. `sampling` is what
    was asked for: the harness's parameters under the session's overrides. There is one call id per choice. `recalled`: what a fork's
    recording makes of it; a call that is replayed has the ids and the start it had. With a `lookahead` the request asks for its
    candidates."""

    session_id: str
    call_id: str
    """The first choice's, under which the call's intent is stored."""
    tree: Session
    draft: Draft
    request: Request
    digest: bytes
    call_ids: list[str]
    scope: CancelScope
    started_at: float
    clock: float
    timeline: Timeline
    sampling: Mapping[str, Any]
    marks: Mapping[str, str]
    purpose: Purpose
    recalled: Recalled | None = None
    lookahead: Lookahead | None = None

    @property
    def shown(self) -> Request:
        """The request as the harness made it: of a lookahead's candidates it gets one."""
        return self.request if self.lookahead is None else replace(self.request, n=1)


@dataclass(frozen=True, slots=True)
class Planned:
    """A call at its replica. `plan` is None where the engine renders the messages; `sampling` is what the engine is asked for, into
    which its kind may write what it reduced. `granted` is what the call reserved of the session's budget."""

    turn: Turn
    replica: Replica
    found: Continuation
    plan: TokenPlan | None
    sampling: dict[str, Any]
    granted: Share = NO_SHARE


@dataclass(frozen=True, slots=True)
class Sampled:
    """A call that was sampled."""

    planned: Planned
    outcome: EngineReply
    chosen: bool = False
    """Whether the first choice was chosen from the candidates of a lookahead."""

    @property
    def prompt_ids(self) -> Ids | None:
        """The ids that were sampled after; None if the engine did not tell."""
        plan = self.planned.plan
        return self.outcome.prompt_ids if plan is None else plan.prompt_ids

    @property
    def media(self) -> tuple[Media, ...]:
        """The images of the prompt."""
        plan = self.planned.plan
        return () if plan is None or not plan.media else name_ranges(plan.media, self.planned.turn.request.images)

    @property
    def placeholders(self) -> list[int]:
        """The ids that stand for its images."""
        plan = self.planned.plan
        return [] if plan is None else find_placeholders(plan.prompt_ids, plan.media)

    @property
    def branch_reason(self) -> str | None:
        """Why the prompt is a fresh rendering where it was planned as one."""
        plan = self.planned.plan
        return None if plan is None else plan.branch_reason


def marks_of(request: Request, headers: Mapping[str, str]) -> Marks:
    """What rules about roles look at."""
    messages = request.history
    system = messages[0].message if messages[0].message.get("role") in ("system", "developer") else {}
    last = messages[-1].message
    return Marks(headers, bool(request.tools), _text(system), _text(last), last.get("role") == "user")


def _text(message: Mapping[str, Any]) -> str:
    content = plain_content(message.get("content"))
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part for part in parts if isinstance(part, str))


# The call that a request continues, and the ids to sample after.


@dataclass(frozen=True, slots=True)
class Continuation:
    """Where a request stands: its chain, and the call whose reply is its message number `reply_at` (None: a root).

    `dress` is what the rendering of the request depends on beside its messages (see reconstruct.messages.dress). `redressed`: the
    parent's was another, so that a rendering is to prove that it makes no difference.

    `near` is the call whose whole request is the longest known beginning of this one, and `near_at` how many messages that is: a
    retry or another sample when it is all of them, an edited history when it goes on otherwise.
    """

    root: bytes
    chain: list[bytes]
    parent: Call | None = None
    reply_at: int = -1
    projection: str = ""
    near: str | None = None
    near_at: int = 0
    dress: bytes = b""
    redressed: bool = False
    replay: ReplayedHistory | None = None
    """How the request replays the parent and all calls before it."""
    chained: Chained | None = None
    base: str | None = None
    """The call on whose ids the prompt of a request without a parent is stored if `near` is None; None: the latest."""

    @property
    def fingerprint(self) -> bytes:
        return self.chain[-1]

    @property
    def repeated(self) -> bool:
        return self.near is not None and self.near_at == len(self.chain) - 1

    @property
    def edited(self) -> bool:
        return self.near is not None and not self.repeated and self.near_at > self.reply_at + 1


@dataclass(slots=True)
class TokenPlan:
    """The ids to sample after, why they are a fresh rendering (None: they extend the parent), and the generate body.
    `rendering` is what the template makes of the whole request, `keeps_text_apart` whether control tokens in texts are text in it, `media`
    the ranges of the images."""

    prompt_ids: Ids
    branch_reason: str | None
    rendering: Ids
    body: dict[str, Any] = field(default_factory=dict)
    keeps_text_apart: bool = False
    media: Ranges = ()


def continuation(tree: Session, request: Request, policy: str = "") -> Continuation:
    """The call that `request`, which `policy` is to answer, continues, found from the last message backwards."""
    rendered = {name: request.forward[name] for name in _RENDERED if name in request.forward}
    root, chained_root = tree.roots(policy, request.tools, {**request.template_kwargs, **rendered})
    history = request.history
    chained = tree.chained(chained_root, history)
    fingerprints, names = chained.fingerprints, chained.names

    def dress_of(length: int) -> bytes:
        return dress(root, [name for name in names if name[0] < length]) if names else root

    near, near_at, whole = None, 0, dress_of(len(history))
    for position in range(len(history) - 1, -1, -1):
        asked = tree.forest.find_by_prompt(fingerprints[position + 1])
        if asked and near is None:
            near = _dressed_so(tree, asked, dress_of(position + 1))
            near_at = position + 1 if near is not None else 0
        if history[position].digests.is_assistant:
            found = _answered(tree, request, position, fingerprints, dress_of(position))
            if found is not None:
                parent, used, replay = found
                redressed = parent.root_key != dress_of(position)
                return Continuation(
                    root, fingerprints, parent, position, used, near, near_at, whole, redressed, replay, chained
                )
    return Continuation(root, fingerprints, near=near, near_at=near_at, dress=whole, chained=chained)


def _dressed_so(tree: Session, call_ids: Iterable[str], dressed: bytes) -> str | None:
    """The first of the calls that has that dress."""
    return next((call_id for call_id in call_ids if tree.forest.calls[call_id].root_key == dressed), None)


def _answered(
    tree: Session, request: Request, position: int, fingerprints: Sequence[bytes], dressed: bytes
) -> tuple[Call, str, ReplayedHistory] | None:
    """The call whose reply is message number `position`, the projection it is replayed under, and how all before it is.

    Calls that the message itself names come first: by an id that was minted for them, where the history before them is theirs,
    too; then those that said the same, and of these such as have the dress of the history here, and that which began last: each process
    has learned of them in an order of its own. Last come others that were asked the same: the message may differ from what they said
    by a declared projection that the chain does not leave out.
    """
    replayed = request.history[position]
    candidates = tree.forest.find_by_reply(fingerprints[position + 1])
    named: Iterable[str] = [call_id for call_id in replayed.minted if call_id in candidates]
    if not named:
        asked_here = tree.forest.find_by_prompt(fingerprints[position])
        by_id = [call_id for call_id in replayed.minted if call_id in asked_here]
        latest = _latest_first(tree, candidates)
        alike = _dressed_so(tree, latest, dressed)
        first = [] if alike is None else [alike]
        named = (*by_id, *first, *latest, *asked_here[: -_MOST_COMPARED - 1 : -1])
    for call_id in named:
        call = tree.forest.calls[call_id]
        used = tree.projection(call.call_id, replayed, request.schemas)
        if used is not None and (replay := _replay(tree, call, request)) is not None:
            return call, used, replay
    return None


def _latest_first(tree: Session, call_ids: Sequence[str]) -> Sequence[str]:
    if len(call_ids) < 2:
        return call_ids
    return sorted(call_ids, key=lambda call_id: order_key(tree.forest.calls[call_id]), reverse=True)


def _replay(tree: Session, call: Call, request: Request) -> ReplayedHistory | None:
    """The history up to the call's reply, if it and all calls before it are replayed without an edit of their reasoning, which
    the chain leaves out. Looked at only from the last call on that these messages are known to replay."""
    history = request.history
    known, new = None, []
    for old in tree.forest.lineage(call.call_id):
        known = tree.replay(old.call_id, history)
        if known is not None:
            break
        if tree.projection(old.call_id, history[old.message_count], request.schemas) is None:
            return None
        new.append(old)
    messages: list[Message] = list(known.messages) if known else []
    for old in reversed(new):
        messages += _after_reply(tree, messages, history, old.message_count)
        messages.append(tree.engine_reply(old.call_id))
    return ReplayedHistory(history[: len(messages)], messages)


def _after_reply(tree: Session, replayed: Sequence[Message], history: Sequence[HistoryMessage], end: int) -> Sequence[Message]:
    """The messages of `history` that follow those `replayed`, up to number `end`, named after the reply that comes before them."""
    begin = len(replayed)
    after = tree.engine_messages(history[begin:end])
    return name_calls(tree.engine_message(history[begin - 1]), replayed[-1], after) if replayed else after


def remember(tree: Session, found: Continuation) -> None:
    """The call is recorded: the next one mostly goes on from the same history."""
    if found.chained is not None:
        tree.remember(found.chained)
    if found.parent is not None and found.replay is not None:
        tree.replayed(found.parent.call_id, found.replay)


def as_root(found: Continuation) -> Continuation:
    """The same request, that goes on from nothing."""
    if found.parent is None:
        return found
    return replace(found, parent=None, reply_at=-1, projection="", redressed=False, replay=None)


def confirm_by_ids(tree: Session, found: Continuation, prompt_ids: Ids | None) -> Continuation:
    """The same for an engine that renders by itself: its prompt begins with the parent's prompt, or the request is a root."""
    parent = found.parent
    if parent is None or not found.redressed:
        return found
    if prompt_ids is None or not parent.ids_known:
        return as_root(found)
    before = tree.forest.prompt_ids(parent.call_id)
    return replace(found, redressed=False) if shared_length(before, prompt_ids) == len(before) else as_root(found)


def parent_of(tree: Session, found: Continuation, request: Request) -> Parent | None:
    """What the prompt depends on of the call that the request continues."""
    parent = found.parent
    if parent is None or found.replay is None:
        return None
    history = found.replay.messages
    tail = _after_reply(tree, history, request.history, len(request.history))
    ids, asked = tree.known_ids(parent.call_id), tree.rendering(parent.call_id)
    ranges: Ranges = ()
    if tree.forest.has_media:
        ranges = tuple((each.start, each.length) for each in tree.forest.media(parent.call_id))
    return Parent(history, tail, ids, len(parent.node.completion_ids), _closed(parent), asked, found.redressed, ranges)


async def plan_tokens(
    tree: Session, found: Continuation, request: Request, render: Render, retain_thinking: bool
) -> tuple[Continuation, TokenPlan]:
    """The prompt for the token path, rendered by `render`, and what the request continues according to the renderings."""
    parent = parent_of(tree, found, request)
    rendered: dict[int, Rendered] = {}
    steps = plan(
        request.engine_messages,
        parent,
        tree.turn_ends.get(found.root),
        retain_thinking=retain_thinking,
        media_of=lambda rendering: rendered[id(rendering)].media,
    )
    step = next(steps)
    while True:
        ask = render if step.required else _tolerant(render)
        answers = await _all_of([ask(rendering) for rendering in step.renderings])
        rendered |= {id(rendering): answer for rendering, answer in zip(step.renderings, answers, strict=True)}
        try:
            step = steps.send([answer.ids for answer in answers])
        except StopIteration as stop:
            prompt, whole = stop.value
            made = rendered[id(whole)]
            return take_prompt(tree, found, prompt, made.body, keeps_text_apart=made.keeps_text_apart)


def take_prompt(
    tree: Session, found: Continuation, prompt: Prompt, body: dict[str, Any], *, keeps_text_apart: bool = False
) -> tuple[Continuation, TokenPlan]:
    """What the call continues and its plan, of a prompt that was made here or by the engine. The tree remembers the turn end.

    The call is a root where it was found below a call of another dress and the template shows the difference."""
    if prompt.close is not None:
        tree.turn_ends[found.root] = prompt.close
    if not prompt.continues:
        found = as_root(found)
    elif found.redressed and found.parent is not None and tree.known_ids(found.parent.call_id) is not None:
        found = replace(found, redressed=False)
    if prompt.adds_end:
        found = replace(found, projection=declare(found.projection, TURN_END))
    return found, TokenPlan(prompt.ids, prompt.branch_reason, prompt.rendering, body, keeps_text_apart, prompt.media)


async def _all_of(answers: Sequence[Coroutine[Any, Any, Rendered]]) -> list[Rendered]:
    """What each gives; a first call asks for one, which needs no task of its own."""
    return [await answers[0]] if len(answers) == 1 else list(await asyncio.gather(*answers))


def _tolerant(render: Render) -> Render:
    async def attempt(rendering: Rendering) -> Rendered:
        try:
            return await render(rendering)
        except RequestError:
            return Rendered(pack_ids(()), {})

    return attempt


def _closed(call: Call) -> bool:
    """Whether the model ended the turn itself: one of its end tokens is the last sampled id."""
    return call.finish_reason in ("stop", "tool_calls") and not isinstance(call.stop_reason, str)


# What the engine can take.


def fit_window(request: Request, replica: Replica, sampling: dict[str, Any], prompt_length: int) -> None:
    """Clamp max_tokens to what the window leaves. Raises ContextTooLong when the prompt alone does not fit."""
    window = replica.max_model_len
    if window is None:
        return
    room = window - prompt_length
    if room < 1:
        field = "messages" if request.prompt is None else "prompt"
        raise ContextTooLong(
            f"This model's maximum context length is {window} tokens. However, your {field} resulted in "
            f"{prompt_length} tokens. Please reduce the length of the {field}.",
            param=field,
            tokens=prompt_length,
            window=window,
        )
    sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)


_TEXTS = ("text", "input_text", "output_text", "refusal", "thinking")


def check_places(request: Request, media: Ranges) -> None:
    """Raise RequestError unless the prompt has a place for each image of the request, and for no others."""
    if len(media) != len(request.images):
        raise RequestError(
            f"the engine's template of model '{request.model}' shows {len(media)} of the request's {len(request.images)} images",
            param=dialects()[request.dialect].history_field,
        )


def refuse_media(request: Request, found: Continuation, kinds: EngineKinds, kind: EngineKind) -> None:
    """Raise RequestError for content parts that the token path, with this kind of engine, cannot carry. What it has carried before is not
    checked again."""
    if request.images:
        refuse_images(request, kind)
    carried = found.reply_at + 1 if found.parent is not None and kinds.takes_ids(found.parent.api) else 0
    for position in range(carried, len(request.history)):
        content = request.history[position].message.get("content")
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, dict):
                continue
            type_ = part.get("type", "text" if "text" in part else next(iter(part), ""))
            if type_ not in _TEXTS and type_ != "image":
                raise _media_refused(request, position, str(type_))


def refuse_images(request: Request, kind: EngineKind) -> None:
    """Raise RequestError if the kind of engine takes none."""
    if not kind.takes_images:
        raise _media_refused(request, next(at for at, seen in enumerate(request.history) if seen.images), "image")


def _media_refused(request: Request, position: int, kind: str) -> RequestError:
    role = request.history[position].message.get("role")
    reason = f"has a part of type '{kind}', which the engine of model '{request.model}' does not take"
    dialect = dialects()[request.dialect]
    if not dialect.is_one_to_one:
        listed = dialect.history_field
        return RequestError(f"'{listed}': message {position + 1} as the model sees them ({role}) {reason}", param=listed)
    return RequestError(f"messages[{position}] ({role}) {reason}", param=f"messages[{position}].content")
