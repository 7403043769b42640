"""Plan the prompt of one call: find the call it continues, and the ids to sample after.

`continuation` looks a request up in the session's forest: by the ids minted into the last assistant message's tool calls, then
by the fingerprint chain. `plan_tokens` makes the prompt for the token path: the parent's ids and a proven bridge, or a fresh
rendering with the reason. `place` says where a prompt's ids hang in the forest, whoever rendered them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from proxy.call.tree import Chained, Replay, SessionTree
from proxy.dialects.base import HistoryMessage, Request
from proxy.engine.apis.renderer import Rendered
from proxy.errors import RequestError
from reconstruct.bridge import Rendering
from reconstruct.forest import order_key, shared_length
from reconstruct.messages import Message, dress, name_calls
from reconstruct.prompt import IDS_UNKNOWN, Parent, Prompt, plan
from reconstruct.records import Call, Ids, pack_ids

_RENDERED = ("reasoning_effort", "chat_template", "documents")
"""Fields of a chat body that the template may look at, beside its kwargs: under other values a history may read otherwise."""

_MOST_COMPARED = 32
"""Calls of one request, the newest first, that a reply without an id is compared with: a request may be sampled ten thousand times."""

Render = Callable[[Rendering], Coroutine[Any, Any, Rendered]]


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
    replay: Replay | None = None
    """How the request replays the parent and all calls before it."""
    chained: Chained | None = None

    @property
    def fingerprint(self) -> bytes:
        return self.chain[-1]

    @property
    def repeated(self) -> bool:
        return self.near is not None and self.near_at == len(self.chain) - 1

    @property
    def edited(self) -> bool:
        return self.near is not None and not self.repeated and self.near_at > self.reply_at + 1


@dataclass(frozen=True, slots=True)
class Place:
    """Where a prompt hangs in the forest: see reconstruct.records.Node."""

    parent_id: str | None
    branch_reason: str | None
    base_id: str | None
    base_length: int
    delta_ids: Ids


@dataclass(slots=True)
class TokenPlan:
    """The ids to sample after, why they are a fresh rendering (None: they extend the parent), and the generate body.
    `rendering` is what the template makes of the whole request, `keeps_text_apart` whether control tokens in texts are text in it."""

    prompt_ids: Ids
    branch_reason: str | None
    rendering: Ids
    body: dict[str, Any] = field(default_factory=dict)
    keeps_text_apart: bool = False


def continuation(tree: SessionTree, request: Request, policy: str = "") -> Continuation:
    """The call that `request`, which `policy` is to answer, continues, found from the last message backwards."""
    rendered = {name: request.forward[name] for name in _RENDERED if name in request.forward}
    root, chained_root = tree.roots(request.model, request.tools, {**request.template_kwargs, **rendered}, policy)
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


def _dressed_so(tree: SessionTree, call_ids: Iterable[str], dressed: bytes) -> str | None:
    """The first of the calls that has that dress."""
    return next((call_id for call_id in call_ids if tree.forest.calls[call_id].root_key == dressed), None)


def _answered(
    tree: SessionTree, request: Request, position: int, fingerprints: Sequence[bytes], dressed: bytes
) -> tuple[Call, str, Replay] | None:
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


def _latest_first(tree: SessionTree, call_ids: Sequence[str]) -> Sequence[str]:
    if len(call_ids) < 2:
        return call_ids
    return sorted(call_ids, key=lambda call_id: order_key(tree.forest.calls[call_id]), reverse=True)


def _replay(tree: SessionTree, call: Call, request: Request) -> Replay | None:
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
        messages += _after_reply(messages, history, old.message_count)
        messages.append(tree.reply(old.call_id))
    return Replay(history[: len(messages)], messages)


def _after_reply(replayed: Sequence[Message], history: Sequence[HistoryMessage], end: int) -> Sequence[Message]:
    """The messages of `history` that follow those `replayed`, up to number `end`, named after the reply that comes before them."""
    begin = len(replayed)
    after = [seen.message for seen in history[begin:end]]
    return name_calls(history[begin - 1].message, replayed[-1], after) if replayed else after


def remember(tree: SessionTree, found: Continuation) -> None:
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


def confirm_by_ids(tree: SessionTree, found: Continuation, prompt_ids: Ids | None) -> Continuation:
    """The same for an engine that renders by itself: its prompt begins with the parent's prompt, or the request is a root."""
    parent = found.parent
    if parent is None or not found.redressed:
        return found
    if prompt_ids is None or not parent.ids_known:
        return as_root(found)
    before = tree.forest.prompt_ids(parent.call_id)
    return replace(found, redressed=False) if shared_length(before, prompt_ids) == len(before) else as_root(found)


def parent_of(tree: SessionTree, found: Continuation, request: Request) -> Parent | None:
    """What the prompt depends on of the call that the request continues."""
    parent = found.parent
    if parent is None or found.replay is None:
        return None
    history = found.replay.messages
    tail = _after_reply(history, request.history, len(request.history))
    ids, asked = tree.known_ids(parent.call_id), tree.rendering(parent.call_id)
    return Parent(history, tail, ids, len(parent.node.completion_ids), _closed(parent), asked, found.redressed)


async def plan_tokens(
    tree: SessionTree, found: Continuation, request: Request, render: Render, retain_thinking: bool
) -> tuple[Continuation, TokenPlan]:
    """The prompt for the token path, rendered by `render`, and what the request continues according to the renderings."""
    parent = parent_of(tree, found, request)
    steps = plan(request.messages, parent, tree.turn_ends.get(found.root), retain_thinking=retain_thinking)
    rendered: dict[int, Rendered] = {}
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
    tree: SessionTree, found: Continuation, prompt: Prompt, body: dict[str, Any], *, keeps_text_apart: bool = False
) -> tuple[Continuation, TokenPlan]:
    """What the call continues and its plan, of a prompt that was made here or by the engine. The tree remembers the turn end.

    The call is a root where it was found below a call of another dress and the template shows the difference."""
    if prompt.close is not None:
        tree.turn_ends[found.root] = prompt.close
    if not prompt.continues:
        found = as_root(found)
    elif found.redressed and found.parent is not None and tree.known_ids(found.parent.call_id) is not None:
        found = replace(found, redressed=False)
    return found, TokenPlan(prompt.ids, prompt.branch_reason, prompt.rendering, body, keeps_text_apart)


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


def place(tree: SessionTree, found: Continuation, prompt_ids: Ids | None, branch_reason: str | None) -> Place:
    """Where `prompt_ids` (None: not known) hang: on the parent where they begin with all of its ids, else on the call that probably
    shares most.

    `branch_reason` is why the prompt is a fresh rendering, None when it was made to extend the parent. It is the place's where the
    prompt does not extend the parent.
    """
    parent_id = found.parent.call_id if found.parent else None
    if prompt_ids is None:
        return Place(parent_id, _root_reason(tree, found) if parent_id is None else IDS_UNKNOWN, None, 0, pack_ids(()))
    base = _nearest_known(tree, parent_id or found.near or next(reversed(tree.forest.calls), None))
    known = tree.known_ids(base) if base is not None else None
    shared = shared_length(known, prompt_ids) if known is not None else 0
    if parent_id is None:
        reason = _root_reason(tree, found)
    elif base != parent_id:
        reason = branch_reason or IDS_UNKNOWN
    elif shared < tree.forest.full_length(parent_id):
        reason = branch_reason or "retokenized"
    else:
        # Also where nothing proved it beforehand: a fresh rendering may begin with all of the parent's ids.
        reason = _fork_reason(tree, found, parent_id)
    return Place(parent_id, reason, base if shared else None, shared, prompt_ids[shared:])


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


def _closed(call: Call) -> bool:
    """Whether the model ended the turn itself: a stop token is the last sampled id."""
    return call.finish_reason in ("stop", "tool_calls") and not isinstance(call.stop_reason, str)
