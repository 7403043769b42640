"""Pages of tokens with their texts, as the token view asks for them."""

from __future__ import annotations

from typing import Any

from proxy.ui.token_source import TokenSource
from proxy.ui.token_texts import TokenTexts

LARGEST = 1000
LEAD = 3
"""Tokens before a page that are looked at with it: a character may begin there."""


async def token_page(source: TokenSource, texts: TokenTexts, start: int, count: int, *, overview: bool) -> dict[str, Any]:
    """The tokens from `start` on, at most `count`: what `TokenSource.page` tells, their texts, and what else could have been sampled."""
    start = max(0, min(start, max(0, len(source) - 1)))
    lead = min(LEAD, start)
    ids = source.ids[start - lead : start + count + LEAD].tolist()
    told = await texts.of(source.policy, ids)
    shown = source.page(start, count)
    shown["texts"] = told.texts[lead : lead + len(shown["ids"])]
    shown["missing"] = told.missing
    shown["alternatives"] = await _alternatives(source, texts, start, count)
    if overview:
        shown["overview"] = source.overview()
    return shown


async def _alternatives(source: TokenSource, texts: TokenTexts, start: int, count: int) -> dict[str, list[list[Any]]]:
    """By position: id, text and logprob of the most probable tokens."""
    found = source.alternatives(start, count)
    wanted = list({token for each in found.values() for token, _ in each})
    spelled = await texts.alone(source.policy, wanted)
    return {
        str(position): [[token, spelled.get(token), logprob] for token, logprob in each] for position, each in found.items()
    }
