"""TokenTexts: what token ids say, asked of the engine's own tokenizer.

vLLM's token path spells many groups of ids in one request. Where prompts are rendered in this process its tokenizer is used; other
engines are asked at `/detokenize`, group by group. What they say is remembered: a text depends on its ids alone. A token that is a part
of a character has no text of its own; up to four in a row that make one are spelled together.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from proxy.engine.local_renderer import LocalRenderer
from proxy.engine.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.engine.wire import EngineHttp
from proxy.errors import EngineUnavailable, VerbatimError

REMEMBERED = 400_000
"""Groups whose text is kept, of all vocabularies."""
AT_ONCE = 1024
"""Groups in one request."""
ASKED_AT_ONCE = 16
"""Requests under way at an engine that spells one group at a time."""
CHARACTER_BYTES = 4
"""The longest character, which byte tokens may spell one by one."""
AGAIN_SECONDS = 30.0
"""How soon an engine that could not spell is asked again."""

Group = tuple[int, ...]


class _Spelled(msgspec.Struct):
    text: str = ""
    prompt: str = ""


class _Derendered(msgspec.Struct):
    choices: list[_Spelled]


@dataclass(frozen=True, slots=True)
class Texts:
    """One text per token; None where nobody can tell it, with the reason in `missing`. Of tokens that make one character together the
    first has its text and the others have ""."""

    texts: list[str | None]
    missing: str = ""


class TokenTexts:
    def __init__(self, pool: EnginePool, renderer: LocalRenderer) -> None:
        self._pool = pool
        self._http = EngineHttp(pool)
        self._renderer = renderer
        self._known: OrderedDict[tuple[tuple[str, ...], Group], str] = OrderedDict()
        self._silent: dict[str, tuple[float, str]] = {}

    async def of(self, policy: str, ids: Sequence[int]) -> Texts:
        """What each of the ids says, one after the other. Never raises for an engine that cannot be asked."""
        try:
            replica, vocabulary = self._vocabulary(policy)
            told = await self._learn(replica, vocabulary, [(token,) for token in ids])
            told |= await self._learn(replica, vocabulary, _characters(told, ids))
        except VerbatimError as error:
            return Texts([None] * len(ids), error.message)
        return Texts(_put_together(told, ids))

    async def alone(self, policy: str, ids: Sequence[int]) -> dict[int, str | None]:
        """What each of the ids says by itself."""
        try:
            replica, vocabulary = self._vocabulary(policy)
            told = await self._learn(replica, vocabulary, [(token,) for token in ids])
        except VerbatimError:
            return {}
        return {token: told[(token,)].rstrip("\ufffd") or None for token in ids}

    def _vocabulary(self, policy: str) -> tuple[Replica, tuple[str, ...]]:
        """Who is asked, and whose tokenizer answers. Raises EngineUnavailable where nobody can be asked now."""
        try:
            replica = self._pool.serving(policy)[0]
        except EngineUnavailable as error:
            raise EngineUnavailable("no engine is there to spell tokens") from error
        until, why = self._silent.get(replica.name, (0.0, ""))
        if time.monotonic() < until:
            raise EngineUnavailable(why)
        return replica, (policy, *replica.models)

    async def _learn(self, replica: Replica, vocabulary: tuple[str, ...], groups: Iterable[Group]) -> dict[Group, str]:
        """The text of each group, whether it stays remembered or not."""
        wanted = dict.fromkeys(groups)
        told = {group: self._known[vocabulary, group] for group in wanted if (vocabulary, group) in self._known}
        new = [group for group in wanted if group not in told]
        for start in range(0, len(new), AT_ONCE):
            part = new[start : start + AT_ONCE]
            try:
                texts = await self._spell(replica, part)
            except VerbatimError as error:
                why = f"the engine does not spell tokens: {error.message}"
                self._silent[replica.name] = (time.monotonic() + AGAIN_SECONDS, why)
                raise EngineUnavailable(why) from error
            told.update(zip(part, texts, strict=True))
        self._known.update(((vocabulary, group), told[group]) for group in new)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return told

    async def _spell(self, replica: Replica, groups: Sequence[Group]) -> list[str]:
        """Raises VerbatimError where it cannot be told."""
        if replica.api == "token":
            return await self._derendered(replica, groups)
        if self._renderer.is_set:
            return await self._renderer.spell_each(groups)
        turn = asyncio.Semaphore(ASKED_AT_ONCE)

        async def one(group: Group) -> str:
            async with turn:
                body: dict[str, Any] = {"tokens": list(group), **({"model": replica.models[0]} if replica.models else {})}
                return (await self._http.ask(replica, "/detokenize", body, _Spelled)).prompt

        # The first alone: one refusal is enough.
        return [await one(groups[0]), *await asyncio.gather(*map(one, groups[1:]))] if groups else []

    async def _derendered(self, replica: Replica, groups: Sequence[Group]) -> list[str]:
        model = replica.models[0] if replica.models else ""
        choices = [{"index": at, "token_ids": list(group)} for at, group in enumerate(groups)]
        body = {
            "model": model,
            "generate_responses": [{"choices": choices}],
            # Alone, a word loses the blank before it where a tokenizer marks blanks at the words' beginnings.
            "prompt_token_ids": [[0]],
            "completion_request": {"model": model, "prompt": "?", "skip_special_tokens": False},
        }
        answer = await self._http.ask(replica, "/v1/completions/derender", body, _Derendered)
        return [choice.text for choice in answer.choices]


def _characters(told: Mapping[Group, str], ids: Sequence[int]) -> list[Group]:
    """Groups that may make a character: those that begin with a token that is not whole."""
    return [
        tuple(ids[at : at + length])
        for at in range(len(ids))
        if _is_part(told, ids[at])
        for length in range(2, CHARACTER_BYTES + 1)
        if at + length <= len(ids)
    ]


def _is_part(told: Mapping[Group, str], token: int) -> bool:
    text = told[(token,)]
    return not text or "\ufffd" in text


def _put_together(told: Mapping[Group, str], ids: Sequence[int]) -> list[str | None]:
    texts: list[str | None] = []
    while len(texts) < len(ids):
        at = len(texts)
        length = _whole(told, ids, at)
        text = told[tuple(ids[at : at + length])]
        shown = text if text.strip("\ufffd") else None
        texts += [shown, *([""] * (length - 1))]
    return texts


def _whole(told: Mapping[Group, str], ids: Sequence[int], at: int) -> int:
    """How many tokens from `at` on make the shortest text without a broken character; 1 where none do."""
    if _is_part(told, ids[at]):
        for length in range(2, min(CHARACTER_BYTES, len(ids) - at) + 1):
            text = told[tuple(ids[at : at + length])]
            if text and "\ufffd" not in text:
                return length
    return 1
