"""Find the call that a request continues, and plan the prompt: the parent's ids and a proven bridge, or a fresh rendering with the reason.

`find_parent` looks the request up in the session's forest, by the ids minted into the last assistant message's tool calls, then by the
fingerprint chain. `MessagesPlanner.plan` makes the prompt for an engine that takes ids.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec

from proxy.call.budget import find_rooms
from proxy.call.phases import Admitted, Continuation, TokenPlan
from proxy.call.session import ReplayedHistory, Session
from proxy.dialects.base import HistoryMessage, Request
from proxy.dialects.catalogue import dialects
from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.json_text import NO_IDS
from proxy.engine.apis.renderer import Rendered
from proxy.engine.replica import Replica
from proxy.errors import ContextTooLong, RequestError
from proxy.store.states import Share
from reconstruct.media import Ranges
from reconstruct.messages import TURN_END, Message, declare, name_calls, plain_content, render_key
from reconstruct.prompt import Parent, Prompt, Rendering, plan
from reconstruct.records import Call, Ids, order_key, shared_length
from reconstruct.roles import Marks

_replace = msgspec.structs.replace

_RENDERED = ("reasoning_effort", "chat_template", "documents")
"""Fields of a chat body that the template may look at, beside its kwargs: under other values a history may read otherwise."""

_MOST_COMPARED = 32
"""Calls of one request, the newest first, that a reply without an id is compared with: a request may be sampled ten thousand times."""


def read_marks(request: Request, headers: Mapping[str, str]) -> Marks:
    """What rules about roles look at."""
    messages = request.history
    system = messages[0].message if messages[0].message.get("role") in ("system", "developer") else {}
    last = messages[-1].message
    return Marks(headers, bool(request.tools), _text(system), _text(last), last.get("role") == "user")


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    content = plain_content(content)
    parts = content if isinstance(content, list) else [content]
    return "\n".join(part for part in parts if isinstance(part, str))


# The call that a request continues, and the ids to sample after.


def find_parent(session: Session, request: Request, policy: str = "") -> Continuation:
    """The call that `request`, which `policy` is to answer, continues, found from the last message backwards."""
    rendered = {name: request.forward[name] for name in _RENDERED if name in request.forward}
    root, chained_root = session.roots(policy, request.tools, {**request.template_kwargs, **rendered})
    history = request.history
    chained = session.extend_chain(chained_root, history)
    fingerprints, names = chained.fingerprints, chained.names

    def render_key_of(length: int) -> bytes:
        return render_key(root, [name for name in names if name[0] < length]) if names else root

    nearest, shared_messages, whole = None, 0, render_key_of(len(history))
    for position in range(len(history) - 1, -1, -1):
        asked = session.forest.find_by_prompt(fingerprints[position + 1])
        if asked and nearest is None:
            nearest = _with_render_key(session, asked, render_key_of(position + 1))
            shared_messages = position + 1 if nearest is not None else 0
        if history[position].digests.is_assistant:
            found = _find_replied_call(session, request, position, fingerprints, render_key_of(position))
            if found is not None:
                parent, used, replay = found
                other_render_key = parent.root_key != render_key_of(position)
                return Continuation(
                    root,
                    fingerprints,
                    parent,
                    position,
                    used,
                    nearest,
                    shared_messages,
                    whole,
                    other_render_key,
                    replay,
                    chained,
                )
    return Continuation(root, fingerprints, nearest=nearest, shared_messages=shared_messages, render_key=whole, chained=chained)


def _with_render_key(session: Session, call_ids: Iterable[str], key: bytes) -> str | None:
    """The first of the calls that has that render key."""
    return next((call_id for call_id in call_ids if session.forest.calls[call_id].root_key == key), None)


def _find_replied_call(
    session: Session, request: Request, position: int, fingerprints: Sequence[bytes], key: bytes
) -> tuple[Call, str, ReplayedHistory] | None:
    """The call whose reply is message number `position`, the projection it is replayed under, and how all before it is.

    Calls that the message itself names come first: by an id that was minted for them, where the history before them is theirs,
    too; then those that said the same, and of these such as have the render key of the history here, and that which began last: each
    process has learned of them in an order of its own. Last come others that were asked the same: the message may differ from what they
    said by a declared projection that the chain does not leave out.
    """
    replayed = request.history[position]
    candidates = session.forest.find_by_reply(fingerprints[position + 1])
    named: Iterable[str] = [call_id for call_id in replayed.minted if call_id in candidates]
    if not named:
        same_prompt = session.forest.find_by_prompt(fingerprints[position])
        by_id = [call_id for call_id in replayed.minted if call_id in same_prompt]
        if len(candidates) > 1:
            calls = session.forest.calls
            latest = sorted(candidates, key=lambda call_id: order_key(calls[call_id]), reverse=True)
            alike = _with_render_key(session, latest, key)
            candidates = latest if alike is None else [alike, *latest]
        named = (*by_id, *candidates, *same_prompt[: -_MOST_COMPARED - 1 : -1])
    for call_id in named:
        call = session.forest.calls[call_id]
        used = session.projection(call.call_id, replayed, request.schemas)
        if used is not None and (replay := _replay(session, call, request)) is not None:
            return call, used, replay
    return None


def _replay(session: Session, call: Call, request: Request) -> ReplayedHistory | None:
    """The history up to the call's reply, if it and all calls before it are replayed without an edit of their reasoning, which
    the chain leaves out. Looked at only from the last call on that these messages are known to replay."""
    history = request.history
    known, new, calls = None, list[Call](), session.forest.calls
    old: Call | None = call
    while old is not None and (known := session.replay(old.call_id, history)) is None:
        if session.projection(old.call_id, history[old.message_count], request.schemas) is None:
            return None
        new.append(old)
        old = calls[old.node.parent_id] if old.node.parent_id is not None else None
    messages: list[Message] = list(known.messages) if known else []
    for old in reversed(new):
        messages += _after_reply(session, messages, history, old.message_count)
        messages.append(session.engine_reply(old.call_id))
    return ReplayedHistory(history[: len(messages)], messages)


def _after_reply(
    session: Session, replayed: Sequence[Message], history: Sequence[HistoryMessage], end: int
) -> Sequence[Message]:
    """The messages of `history` that follow those `replayed`, up to number `end`, named after the reply that comes before them."""
    begin = len(replayed)
    after = session.engine_messages(history[begin:end])
    return name_calls(session.engine_message(history[begin - 1]), replayed[-1], after) if replayed else after


def keep_history(session: Session, found: Continuation) -> None:
    """The call is recorded: the next one mostly goes on from the same history."""
    if found.chained is not None:
        session.remember(found.chained)
    if found.parent is not None and found.replay is not None:
        session.keep_replay(found.parent.call_id, found.replay)


def detach(found: Continuation) -> Continuation:
    """The same request, that goes on from nothing."""
    if found.parent is None:
        return found
    return _replace(found, parent=None, reply_at=-1, projection="", other_render_key=False, replay=None)


def confirm_parent(session: Session, found: Continuation, prompt_ids: Ids | None) -> Continuation:
    """The same for an engine that renders by itself: its prompt begins with the parent's prompt, or the request is a root."""
    parent = found.parent
    if parent is None or not found.other_render_key:
        return found
    if prompt_ids is None or not parent.ids_known:
        return detach(found)
    before = session.forest.prompt_ids(parent.call_id)
    return _replace(found, other_render_key=False) if shared_length(before, prompt_ids) == len(before) else detach(found)


def parent_of(session: Session, found: Continuation, request: Request) -> Parent | None:
    """What the prompt depends on of the call that the request continues."""
    parent = found.parent
    if parent is None or found.replay is None:
        return None
    history = found.replay.messages
    tail = _after_reply(session, history, request.history, len(request.history))
    ids, asked = session.known_ids(parent.call_id), session.find_rendering(parent.call_id)
    ranges: Ranges = ()
    if session.forest.has_media:
        ranges = tuple((each.start, each.length) for each in session.forest.media(parent.call_id))
    # The model ended the turn itself: one of its end tokens is the last sampled id.
    closed = parent.finish_reason in ("stop", "tool_calls") and not isinstance(parent.stop_reason, str)
    return Parent(history, tail, ids, len(parent.node.completion_ids), closed, asked, found.other_render_key, ranges)


def accept_prompt(
    session: Session, found: Continuation, prompt: Prompt, body: Mapping[str, Any], *, keeps_text_apart: bool = False
) -> tuple[Continuation, TokenPlan]:
    """What the call continues and its plan, of a prompt that was made here or by the engine. The session remembers the turn end.

    The call is a root where it was found below a call of another render_key and the template shows the difference."""
    if prompt.close is not None:
        session.turn_ends[found.root] = prompt.close
    if not prompt.continues:
        found = detach(found)
    elif found.other_render_key and found.parent is not None and session.known_ids(found.parent.call_id) is not None:
        found = _replace(found, other_render_key=False)
    if prompt.adds_end:
        found = _replace(found, projection=declare(found.projection, TURN_END))
    return found, TokenPlan(prompt.ids, prompt.branch_reason, prompt.rendering, body, keeps_text_apart, prompt.media)


class MessagesPlanner:
    """For requests with messages. A `Planner`."""

    param = "messages"
    forges_tokens = True

    def find_parent(self, session: Session, request: Request, policy: str = "") -> Continuation:
        return find_parent(session, request, policy)

    def check(self, request: Request, found: Continuation, kinds: EngineKinds, kind: EngineKind) -> None:
        refuse_parts(request, found, kinds, kind)

    async def plan(
        self, session: Session, request: Request, found: Continuation, replica: Replica, kinds: EngineKinds, *, retain: bool
    ) -> tuple[Continuation, TokenPlan]:
        """Renders as the steps of `reconstruct.prompt.plan` want it, those of one step beside each other."""
        kind, id_text = kinds.of(replica), kinds.id_text(session.info.session_id)
        rendered: dict[int, Rendered] = {}

        async def render(rendering: Rendering, required: bool) -> Ids:
            try:
                made = rendered[id(rendering)] = await kind.render(replica, request, rendering, id_text)
            except RequestError:
                if required:
                    raise
                made = rendered[id(rendering)] = Rendered(NO_IDS, {})
            return made.ids

        steps = plan(
            request.engine_messages,
            parent_of(session, found, request),
            session.turn_ends.get(found.root),
            retain_thinking=retain,
            media_of=lambda rendering: rendered[id(rendering)].media,
        )
        step = next(steps)
        while True:
            asked = [render(rendering, step.required) for rendering in step.renderings]
            # A first call asks for one, which needs no task of its own.
            ids = [await asked[0]] if len(asked) == 1 else await asyncio.gather(*asked)
            try:
                step = steps.send(ids)
            except StopIteration as stop:
                prompt, whole = stop.value
                made = rendered[id(whole)]
                return accept_prompt(session, found, prompt, made.body, keeps_text_apart=made.keeps_text_apart)


MESSAGES = MessagesPlanner()

# What the engine can take.


def find_room(call: Admitted, window: int | None, granted: Share, prompt_length: int | None = None) -> dict[str, Any]:
    """The call's parameters, with no more max_tokens than `window` and what it was `granted` of a budget leave after the prompt (None: its
    length is not known). Raises ContextTooLong and BudgetExhausted where that is nothing."""
    sampling, rooms = dict(call.sampling), list[int]()
    if window is not None and prompt_length is not None:
        rooms.append(_leave_room(call.planner.param, window, prompt_length))
    if call.session.has_budget:
        rooms += find_rooms(call.session.info, granted, call.request.n, prompt_length or 0)
    for room in rooms:
        sampling["max_tokens"] = min(sampling.get("max_tokens") or room, room)
    return sampling


def _leave_room(param: str, window: int, prompt_length: int) -> int:
    if prompt_length >= window:
        raise ContextTooLong(
            f"This model's maximum context length is {window} tokens. However, your {param} resulted in "
            f"{prompt_length} tokens. Please reduce the length of the {param}.",
            param=param,
            tokens=prompt_length,
            window=window,
        )
    return window - prompt_length


_TEXTS = ("text", "input_text", "output_text", "refusal", "thinking")


def check_media(request: Request, media: Ranges) -> None:
    """Raise RequestError unless the prompt has a place for each image of the request, and for no others."""
    if len(media) != len(request.images):
        raise RequestError(
            f"the engine's template of model '{request.model}' shows {len(media)} of the request's {len(request.images)} images",
            param=dialects()[request.dialect].history_field,
        )


def refuse_parts(request: Request, found: Continuation, kinds: EngineKinds, kind: EngineKind) -> None:
    """Raise RequestError for content parts that the token path, with this kind of engine, cannot carry. What it has carried before is not
    checked again."""
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
