"""Hindsight: a call's sampled ids after its prompt with a hint in it, as if the model had been told before it answered.

The hint stands at the end of the call's last message. There it changes no roles, so every template takes it, and no earlier message is
shown otherwise because of it. The engine that sampled renders the messages with the hint and without it. What differs is put into the
call's recorded prompt, so the ids before the hint are the very ones that the reply was sampled after, also where they are not those of
their text. `insert_hint` says when that is no prompt of the call's kind: then the call has no score, and the reason.

The placement follows OpenClaw-RL (openclaw_opd_api_server.py), which appends to the last user message and tokenizes all of it again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np

from proxy.call.labels import find_control_tokens
from proxy.dialects.base import Request
from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.json_text import IdText
from proxy.engine.replica import Replica
from proxy.errors import RequestError
from proxy.images import images_in
from proxy.scoring.plan import Place, ScoreRow
from proxy.transcripts import messages_of
from reconstruct.messages import Message, rename_calls
from reconstruct.prompt import Rendering
from reconstruct.records import Call, Forest, Ids, find_engine_id, shared_length

HINTED_ROLES = ("user", "tool", "function", "system", "developer")
"""Of a last message that can have a hint. A prompt without messages has another role."""
MOST_MERGED = 16
"""Ids at the end of the message that may become others because a hint follows them."""


def add_hint(messages: Sequence[Message], hint: str) -> list[Message]:
    """The messages with the hint at the end of the last one. Raises RequestError where it has no place there."""
    if not messages or (role := messages[-1].get("role")) not in HINTED_ROLES:
        said = f"ends in a message of the role {role!r}" if messages else "has no messages"
        raise RequestError(f"a hint has no place in a prompt that {said}")
    if found := find_control_tokens([{"content": hint}]):
        raise RequestError(f"the hint has control tokens, which could end its message: {', '.join(found)}")
    return _append(messages, f"\n\nHint: {hint}" if messages[-1].get("content") else f"Hint: {hint}")


def add_letter(messages: Sequence[Message], hint: str) -> list[Message]:
    """The messages with a letter at the end of the last one, which ends neither as it did nor as the hint."""
    content = messages[-1].get("content") or ""
    last = content[-1] if isinstance(content, list) else content
    ends = {text.rstrip()[-1:] for text in (_read_text(last), hint)}
    return _append(messages, next(letter for letter in "x7q" if letter not in ends))


def _append(messages: Sequence[Message], text: str) -> list[Message]:
    *before, last = messages
    content = last.get("content") or ""
    return [
        *before,
        {**last, "content": [*content, {"type": "text", "text": text}] if isinstance(content, list) else content + text},
    ]


def _read_text(part: Any) -> str:
    text = part.get("text") if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else ""


def insert_hint(prompt: Ids, plain: Ids, hinted: Ids, lettered: Ids) -> tuple[Ids, int]:
    """The prompt with the hint's ids, and where they begin. `plain`, `hinted` and `lettered` are renderings of the call's messages, with
    the hint, and with a letter in its place (see `add_letter`).

    All three must have the same ids behind the last message's text, the generation prompt among them; nothing before that text may be
    shown otherwise because of the hint; and the prompt must end as `plain` does from the hint on. Raises RequestError otherwise."""
    if np.array_equal(plain, hinted):
        raise RequestError("the template does not show the hint")
    closing = _shared_end(plain, lettered)
    if not closing or closing != _shared_end(hinted, lettered):
        raise RequestError("the prompt with the hint does not end in the same generation prompt")
    begin = shared_length(plain, hinted)
    if len(plain) - _shared_end(plain, hinted) - begin > MOST_MERGED:
        raise RequestError("the template shows earlier messages otherwise because of the hint")
    rest = plain[begin:]
    start = len(prompt) - len(rest)
    if start < 0 or not np.array_equal(prompt[start:], rest):
        raise RequestError("the engine does not render the end of the call's prompt as it was recorded")
    return np.concatenate((prompt[:start], hinted[begin:])), start


def _shared_end(left: Ids, right: Ids) -> int:
    """How many of the last ids are the same."""
    return shared_length(left[::-1], right[::-1])


class Hindsight:
    """Of one session's calls: `hints` has those of its calls, by their ids."""

    def __init__(self, forest: Forest, hints: Mapping[str, str]) -> None:
        self._forest = forest
        self._hints = hints
        self._id_text = IdText()

    async def make_row(self, kind: EngineKind, replica: Replica, call: Call, images: Mapping[str, bytes]) -> ScoreRow:
        """The ids that the call is scored with, rendered by an engine of the policy that sampled it. `images`: the bytes of its images, by
        digest. Raises RequestError if there is no such prompt, EngineUnavailable and EngineFailed if the engine cannot tell now."""
        if not kind.takes_ids:
            raise RequestError(f"an engine of the {kind.name} API renders no messages for a hint")
        hint = self._hints[call.call_id]
        messages = [rename_calls(each, partial(find_engine_id, self._forest.calls)) for each in messages_of(call, self._forest)]
        variants = (messages, add_hint(messages, hint), add_letter(messages, hint))
        request = self._make_request(replica, call, messages, images)
        made = await asyncio.gather(*(kind.render(replica, request, Rendering(each, True), self._id_text) for each in variants))
        prompt, media = self._forest.prompt_ids(call.call_id), self._forest.media(call.call_id)
        ids, start = insert_hint(prompt, *(each.ids for each in made))
        if any(each.end > start for each in media):
            raise RequestError("an image stands behind the hint")
        return ScoreRow(np.concatenate((ids, call.node.completion_ids)), media, [Place(call, len(ids))])

    def _make_request(self, replica: Replica, call: Call, messages: Sequence[Message], images: Mapping[str, bytes]) -> Request:
        *_, root = self._forest.lineage(call.call_id)
        preamble: dict[str, Any] = msgspec.json.decode(root.preamble) if root.preamble else {}
        return Request(
            call.dialect,
            replica.models[0] if replica.models else call.policy,
            [],
            tools=preamble.get("tools") or [],
            template_kwargs=preamble.get("template_kwargs") or {},
            images=[digest for message in messages for digest in images_in(message)],
            image_bytes=images,
        )
