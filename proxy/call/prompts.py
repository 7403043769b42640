"""Plan a prompt that is text or token ids instead of messages: which call it goes on from, and the ids to sample after.

A prompt goes on from the longest earlier call that it begins with: with all of its ids, or with the text of its prompt and reply.
Its history is then told as that call's, its reply, and what is new, so that records hold only what is new.

Ids are used exactly as given. Text is tokenised by the engine. Where that does not begin with the ids of the call it goes on from
(what was sampled need not be what its text is tokenised to), the prompt is those ids and the tokenised rest, if the engine spells
them out as the very text. A stop token that the text does not show is no part of it. What cannot be proven is tokenised afresh.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import msgspec
import numpy as np

from proxy.call.phases import Continuation, TokenPlan
from proxy.call.session import Session
from proxy.dialects.base import HistoryMessage, Request
from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.contact import EngineKinds
from proxy.engine.apis.renderer import Tokenizer
from proxy.engine.replica import Replica
from reconstruct.messages import digest_message, root_key
from reconstruct.prompt import IDS_UNKNOWN
from reconstruct.records import NOT_CHOSEN, Call, Ids, order_key, pack_ids, shared_length

_decode = msgspec.json.decode


def find_prompt_parent(session: Session, request: Request, policy: str = "") -> Continuation:
    """The call that the prompt, which `policy` is to answer, goes on from; the request's history is told accordingly."""
    root = root_key(policy, (), {})
    prompt = request.prompt or ""
    of_root = (call for call in session.forest.calls.values() if call.dialect == request.dialect and call.root_key == root)
    calls = [call for call in of_root if call.quarantine_reason != NOT_CHOSEN]
    parent = _by_text(session, calls, prompt) if isinstance(prompt, str) else _by_ids(session, calls, pack_ids(prompt))
    known = 0
    if parent is not None:
        known = _text_end(session, parent) if isinstance(prompt, str) else session.forest.full_length(parent.call_id)
    message = {"role": "prompt", "content": prompt[known:]}
    before = session.history(parent.call_id) if parent is not None else []
    request.replace_history([*before, HistoryMessage(message, digest_message(message))])
    chained = session.extend_chain(root, request.history)
    chain = chained.fingerprints
    asked = session.forest.find_by_prompt(chain[-1])
    nearest, shared_messages = (asked[0], len(chain) - 1) if asked else (None, 0)
    used = "exact" if parent else ""
    return Continuation(root, chain, parent, len(before) - 1, used, nearest, shared_messages, root, chained=chained)


async def plan_prompt(session: Session, found: Continuation, request: Request, tokenizer: Tokenizer) -> TokenPlan:
    """The ids to sample after. Raises RequestError for a prompt that the engine does not take."""
    prompt, parent = request.prompt, found.parent
    if not isinstance(prompt, str):
        ids = pack_ids(prompt)
        return TokenPlan(ids, None, ids, await tokenizer.parameters(prompt or ()))
    fresh = await tokenizer.tokenize(prompt, whole=True)
    known = session.known_ids(parent.call_id) if parent is not None else None
    if parent is None or (known is not None and _begins_with(fresh.ids, known)):
        return TokenPlan(fresh.ids, None, fresh.ids, fresh.body)
    if known is None:
        return TokenPlan(fresh.ids, IDS_UNKNOWN, fresh.ids, fresh.body)
    goes_on = await _continue_text(session, parent, prompt, fresh.ids, tokenizer)
    ids, reason = goes_on if goes_on is not None else (fresh.ids, "text_unproven")
    return TokenPlan(ids, reason, fresh.ids, fresh.body)


async def _continue_text(
    session: Session, parent: Call, prompt: str, fresh: Ids, tokenizer: Tokenizer
) -> tuple[Ids, str | None] | None:
    """The parent's ids and those of the rest of the text, and why they do not extend it (None: they do)."""
    before, said = session.forest.prompt_ids(parent.call_id), parent.node.completion_ids
    added = prompt[_text_end(session, parent) - len(_reply_text(session, parent)) :]
    ids = await _join_ids(before, said, added, fresh, tokenizer)
    if ids is not None:
        return ids, None
    if parent.finish_reason != "stop":
        return None
    ids = await _join_ids(before, said[:-1], added, fresh, tokenizer)
    return (ids, "stop_dropped") if ids is not None else None


async def _join_ids(before: Ids, said: Ids, added: str, fresh: Ids, tokenizer: Tokenizer) -> Ids | None:
    """`before`, `said` and the ids of what `added` says after `said`; None where the engine spells out something else."""
    if not len(said):
        return None
    kept = np.concatenate((before, said))
    if _begins_with(fresh, kept):
        return fresh
    shown = await tokenizer.spell(before, said)
    if not added.startswith(shown):
        return None
    if len(added) == len(shown):
        return pack_ids(kept)
    rest = (await tokenizer.tokenize(added[len(shown) :], whole=False)).ids
    if await tokenizer.spell(before, np.concatenate((said, rest))) != added:
        return None
    return pack_ids(np.concatenate((kept, rest)))


def _by_ids(session: Session, calls: Iterable[Call], prompt: Ids) -> Call | None:
    """The longest call all of whose ids `prompt` begins with."""
    for length, call in _longest_first(calls, len(prompt), session.forest.full_length):
        said = call.node.completion_ids
        # What was sampled last differs first: the whole is put together only for a call that is nearly certain.
        if not np.array_equal(prompt[length - len(said) : length], said):
            continue
        known = session.known_ids(call.call_id)
        if known is not None and _begins_with(prompt, known):
            return call
    return None


def _by_text(session: Session, calls: Iterable[Call], prompt: str) -> Call | None:
    """The longest call whose text `prompt` begins with."""
    for _, call in _longest_first(calls, len(prompt), lambda call_id: _text_end(session, session.call(call_id))):
        if _begins_with_text(session, prompt, call):
            return call
    return None


def _longest_first(calls: Iterable[Call], most: int, length_of: Callable[[str], int]) -> list[tuple[int, Call]]:
    """The calls that said something and are at most `most` long, longest first and of equal ones the latest."""
    sampled = ((length_of(call.call_id), call) for call in calls if len(call.node.completion_ids))
    found = [(length, call) for length, call in sampled if 0 < length <= most]
    found.sort(key=lambda item: (item[0], order_key(item[1])))
    return found[::-1]


def _begins_with_text(session: Session, prompt: str, call: Call) -> bool:
    """Looked at from the end, where other calls differ first."""
    if not _reply_text(session, call):
        return False
    while True:
        told = _describe_prompt(session, call)
        if told is None or not prompt.startswith(told[1], told[0]):
            return False
        if not told[0] or call.node.parent_id is None:
            return True
        call = session.call(call.node.parent_id)


def _text_end(session: Session, call: Call) -> int:
    """Characters of the call's whole prompt and reply; 0 where they are not known as text."""
    told = _describe_prompt(session, call)
    return told[0] + len(told[1]) if told is not None else 0


def _describe_prompt(session: Session, call: Call) -> tuple[int, str] | None:
    """(characters before it, what the call added: its new prompt and its reply); None for a prompt of ids."""
    if call.call_id in session.told:
        return session.told[call.call_id]
    start = 0
    if call.messages_from and call.node.parent_id is not None:
        start = _text_end(session, session.call(call.node.parent_id))
    (message,) = _decode(call.messages)
    content = message["content"]
    known = isinstance(content, str) and (start or not call.messages_from)
    session.told[call.call_id] = (start, content + _reply_text(session, call)) if known else None
    return session.told[call.call_id]


def _reply_text(session: Session, call: Call) -> str:
    return session.reply(call.call_id).get("content") or ""


def _begins_with(ids: Ids, prefix: Ids) -> bool:
    return len(ids) >= len(prefix) and shared_length(ids, prefix) == len(prefix)


class PromptPlanner:
    """For requests with a prompt. A `Planner`."""

    param = "prompt"
    forges_tokens = False

    def find_parent(self, session: Session, request: Request, policy: str = "") -> Continuation:
        return find_prompt_parent(session, request, policy)

    def check(self, request: Request, found: Continuation, kinds: EngineKinds, kind: EngineKind) -> None:
        """A prompt has no parts."""

    async def plan(
        self, session: Session, request: Request, found: Continuation, replica: Replica, kinds: EngineKinds, *, retain: bool
    ) -> tuple[Continuation, TokenPlan]:
        tokenizer = kinds.of(replica).tokenizer(replica, request, kinds.id_text(session.info.session_id))
        return found, await plan_prompt(session, found, request, tokenizer)


PROMPT = PromptPlanner()
