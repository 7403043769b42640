"""TokenList: the tokens of a call or a row as the token view shows them, and TokenTexts: the texts of token ids.

Which tokens there are, and which call sampled them, is read from the session's forest and rows. Nothing here assembles a context itself.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable, VerbatimError
from proxy.ui.session_view import ShownSession
from reconstruct.media import Media
from reconstruct.records import Call, Forest, Ids, Logprobs
from reconstruct.trajectory import Trajectory

PROMPT, TRAINED, CONTEXT, QUARANTINED = range(4)
"""The kinds of tokens: prompt; sampled, mask 1; sampled by an earlier call or another session, mask 0; sampled and quarantined."""
NO_VERSION = -1
BINS = 160
"""Of the overview."""


@dataclass(frozen=True, slots=True)
class TokenList:
    """All arrays have one length. `logprobs` is NaN and `versions` NO_VERSION for tokens that were not sampled. `policy` names the
    vocabulary. `tops`: calls for which the engine reported the most probable tokens, with the position of their first sampled token.
    `media`: the tokens that stand for images. `scores`: logprobs by scorer, NaN where unknown."""

    ids: Ids
    kinds: NDArray[np.uint8]
    logprobs: Logprobs
    versions: NDArray[np.int64]
    policy: str
    tops: tuple[tuple[int, Call], ...] = ()
    media: tuple[Media, ...] = ()
    scores: Mapping[str, Logprobs] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.ids)

    def find_next(self, position: int, what: str, value: float | None = None) -> int | None:
        """The first position after `position` with a surprise (a logprob below `value`), a change of version or kind, or the id
        `value`; None if there is none."""
        # The first token has no predecessor to differ from.
        position = max(position, 0) if what == "kind" else position
        rest = slice(position + 1, None)
        if what == "surprise":
            found = self.logprobs[rest] < (-3.0 if value is None else value)
        elif what == "id":
            found = self.ids[rest] == value
        elif what == "version":
            # Prompt tokens between two versions have none.
            last = _find_last_version(self.versions, position)
            found = (self.versions[rest] != NO_VERSION) & (self.versions[rest] != last)
        else:
            found = self.kinds[rest] != self.kinds[position:-1]
        hits = np.flatnonzero(found)
        return position + 1 + int(hits[0]) if len(hits) else None

    def overview(self) -> list[list[float | int | None]]:
        """Per bin: its first position, the share of sampled tokens, their mean logprob."""
        edges = np.linspace(0, len(self), min(BINS, len(self)) + 1).astype(int) if len(self) else np.zeros(1, dtype=int)
        bins: list[list[float | int | None]] = []
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            sampled = self.kinds[start:end] != PROMPT
            logprobs = self.logprobs[start:end][sampled]
            mean = round(float(np.mean(logprobs)), 3) if len(logprobs) and np.isfinite(logprobs).all() else None
            bins.append([start, round(float(sampled.mean()), 3), mean])
        return bins

    def cut(self, start: int, count: int) -> dict[str, Any]:
        """The tokens from `start` on, without texts: ids, kinds as digits, logprobs (None: not sampled), version runs, and the images that
        they stand for: number, digest, and the positions of their first token and of the token after their last."""
        part = slice(start, start + count)
        return {
            "start": start,
            "total": len(self),
            "ids": self.ids[part].tolist(),
            "kinds": "".join(map(str, self.kinds[part].tolist())),
            "logprobs": _round(self.logprobs[part]),
            "scores": {name: _round(logprobs[part]) for name, logprobs in self.scores.items()},
            "versions": find_version_runs(self.versions[part]),
            "media": [
                [number, each.digest, each.start, each.end]
                for number, each in enumerate(self.media, 1)
                if each.start < start + count and each.end > start
            ],
        }

    def alternatives(self, start: int, count: int) -> dict[int, list[tuple[int, float]]]:
        """The most probable tokens and their logprobs, by position, as far as the engine reported them."""
        found: dict[int, list[tuple[int, float]]] = {}
        for first, call in self.tops:
            details = call.node.details
            assert details is not None and details.top_token_ids is not None and details.top_logprobs is not None
            for position in range(max(start, first), min(start + count, first + len(details.top_token_ids))):
                pairs = zip(
                    details.top_token_ids[position - first].tolist(),
                    details.top_logprobs[position - first].tolist(),
                    strict=True,
                )
                found[position] = [(token, round(logprob, 4)) for token, logprob in pairs if token >= 0]
        return found


def _round(logprobs: Logprobs) -> list[float | None]:
    return [None if np.isnan(each) else round(float(each), 4) for each in logprobs]


def choose_kind(view: ShownSession, call: Call) -> int:
    """The kind of the call's sampled tokens in its session."""
    if call.call_id in view.built.settled.replayed:
        return CONTEXT
    return QUARANTINED if call.call_id in view.quarantined else TRAINED


def build_call_tokens(view: ShownSession, call: Call) -> TokenList:
    """The call's prompt and completion."""
    own = choose_kind(view, call)
    if call.call_id not in view.forest:
        return _build_stray_tokens(call)
    tokens = _build(view.forest, call.call_id)
    tokens.kinds[view.forest.prompt_length(call.call_id) :] = own
    return replace(tokens, tops=_tops(view.forest, [call]))


def build_row_tokens(view: ShownSession, row: Trajectory) -> TokenList:
    """The row's tokens under its own mask."""
    tokens = _build(view.forest, row.call_ids[-1])
    kinds = np.where(row.loss_mask == 1, np.uint8(TRAINED), tokens.kinds).astype(np.uint8)
    trained = [view.forest.calls[call_id] for call_id in row.call_ids]
    scores = {name: score.logprobs for name, score in row.scores.items()}
    return replace(tokens, kinds=kinds, tops=_tops(view.forest, trained), scores=scores)


def find_version_runs(versions: NDArray[np.int64]) -> list[list[int]]:
    """[version, start, end] of each run of one version; positions without a version are left out."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        [int(versions[start]), start, end] for start, end in pairwise(edges) if start < end and versions[start] != NO_VERSION
    ]


def _build(forest: Forest, last: str) -> TokenList:
    """All tokens up to the end of the call `last`: sampled ones as context, the others as prompt."""
    length = forest.full_length(last)
    kinds = np.zeros(length, dtype=np.uint8)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    versions = np.full(length, NO_VERSION, dtype=np.int64)
    for owner, start, end in forest.pieces(last, length):
        node = forest.calls[owner].node
        sampled_from = node.base_length + len(node.delta_ids)
        first, count = max(start, sampled_from), end - max(start, sampled_from)
        if count <= 0:
            continue
        offset = first - sampled_from
        kinds[first:end] = CONTEXT
        if len(node.logprobs) == len(node.completion_ids):
            logprobs[first:end] = node.logprobs[offset : offset + count]
        for span in node.spans:
            versions[max(first, sampled_from + span.start) : min(end, sampled_from + span.end)] = span.version
    media = forest.prefix_media(last, length) if forest.has_media else ()
    return TokenList(forest.full_ids(last), kinds, logprobs, versions, forest.calls[last].policy, media=media)


def _build_stray_tokens(call: Call) -> TokenList:
    """The call's own tokens: it is not in the tree, so what precedes them is unknown."""
    node = call.node
    ids = np.concatenate((node.delta_ids, node.completion_ids))
    sampled_from = len(node.delta_ids)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    if len(node.logprobs) == len(node.completion_ids):
        logprobs[sampled_from:] = node.logprobs
    versions = np.full(len(ids), NO_VERSION, dtype=np.int64)
    for span in node.spans:
        versions[sampled_from + span.start : sampled_from + span.end] = span.version
    kinds = np.where(np.arange(len(ids)) < sampled_from, PROMPT, QUARANTINED).astype(np.uint8)
    return TokenList(ids, kinds, logprobs, versions, call.policy, media=node.media)


def _tops(forest: Forest, calls: Iterable[Call]) -> tuple[tuple[int, Call], ...]:
    return tuple(
        (forest.prompt_length(call.call_id), call)
        for call in calls
        if call.node.details is not None and call.node.details.top_token_ids is not None
    )


def _find_last_version(versions: NDArray[np.int64], position: int) -> int:
    known = np.flatnonzero(versions[: position + 1] != NO_VERSION)
    return int(versions[known[-1]]) if len(known) else NO_VERSION


# TokenTexts: the texts of token ids, from the engine's tokenizer, cached because a text depends only on its ids.
#
# vLLM's token path detokenizes many groups of ids in one request. A local renderer's tokenizer is used if there is one. Other engines take
# one group per request to `/detokenize`. A token that is part of a character has no text of its own, so up to four in a row that make
# one are detokenized together.


CACHED_GROUPS = 400_000
GROUPS_PER_REQUEST = 1024
CHARACTER_BYTES = 4
"""The longest character in UTF-8; each byte may be a token."""
RETRY_SECONDS = 30.0
"""The pause after which an engine that failed to detokenize is asked again."""

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """One text per token; None if it is unknown, for the reason in `missing`. Of the tokens of one character the first has its text and the
    others ""."""

    texts: list[str | None]
    missing: str = ""


class TokenTexts:
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
        self._cached: OrderedDict[tuple[tuple[str, ...], Group], str] = OrderedDict()
        self._failed: dict[str, tuple[float, str]] = {}

    async def spell(self, policy: str, ids: Sequence[int]) -> Texts:
        """The texts of consecutive ids. Does not raise if no engine answers."""
        try:
            replica, vocabulary = self._vocabulary(policy)
            known = await self._look_up(replica, vocabulary, [(token,) for token in ids])
            known |= await self._look_up(replica, vocabulary, _group_characters(known, ids))
        except VerbatimError as error:
            return Texts([None] * len(ids), error.message)
        return Texts(_join(known, ids))

    async def spell_each(self, policy: str, ids: Sequence[int]) -> dict[int, str | None]:
        """The text of each id by itself."""
        try:
            replica, vocabulary = self._vocabulary(policy)
            known = await self._look_up(replica, vocabulary, [(token,) for token in ids])
        except VerbatimError:
            return {}
        return {token: known[(token,)].rstrip("\ufffd") or None for token in ids}

    def _vocabulary(self, policy: str) -> tuple[Replica, tuple[str, ...]]:
        """The replica to ask, and the key of its vocabulary. Raises EngineUnavailable."""
        try:
            replica = self._pool.serving(policy)[0]
        except EngineUnavailable as error:
            raise EngineUnavailable("no engine is available to spell tokens") from error
        until, why = self._failed.get(replica.name, (0.0, ""))
        if time.monotonic() < until:
            raise EngineUnavailable(why)
        return replica, (policy, *replica.models)

    async def _look_up(self, replica: Replica, vocabulary: tuple[str, ...], groups: Iterable[Group]) -> dict[Group, str]:
        """The text of each group, from the cache or the engine."""
        wanted = dict.fromkeys(groups)
        known = {group: self._cached[vocabulary, group] for group in wanted if (vocabulary, group) in self._cached}
        new = [group for group in wanted if group not in known]
        for start in range(0, len(new), GROUPS_PER_REQUEST):
            part = new[start : start + GROUPS_PER_REQUEST]
            try:
                texts = await self._pool.kinds.of(replica).spell(replica, part)
            except VerbatimError as error:
                why = f"the engine does not spell tokens: {error.message}"
                self._failed[replica.name] = (time.monotonic() + RETRY_SECONDS, why)
                raise EngineUnavailable(why) from error
            known.update(zip(part, texts, strict=True))
        self._cached.update(((vocabulary, group), known[group]) for group in new)
        while len(self._cached) > CACHED_GROUPS:
            self._cached.popitem(last=False)
        return known


def _group_characters(known: Mapping[Group, str], ids: Sequence[int]) -> list[Group]:
    """The groups that may form a character: those beginning with a token that is part of one."""
    return [
        tuple(ids[at : at + length])
        for at in range(len(ids))
        if _is_part(known, ids[at])
        for length in range(2, CHARACTER_BYTES + 1)
        if at + length <= len(ids)
    ]


def _is_part(known: Mapping[Group, str], token: int) -> bool:
    text = known[(token,)]
    return not text or "\ufffd" in text


def _join(known: Mapping[Group, str], ids: Sequence[int]) -> list[str | None]:
    texts: list[str | None] = []
    while len(texts) < len(ids):
        at = len(texts)
        length = _count_tokens(known, ids, at)
        text = known[tuple(ids[at : at + length])]
        shown = text if text.strip("\ufffd") else None
        texts += [shown, *([""] * (length - 1))]
    return texts


def _count_tokens(known: Mapping[Group, str], ids: Sequence[int], at: int) -> int:
    """The number of tokens from `at` on that form the shortest unbroken text; 1 if none do."""
    if _is_part(known, ids[at]):
        for length in range(2, min(CHARACTER_BYTES, len(ids) - at) + 1):
            text = known[tuple(ids[at : at + length])]
            if text and "\ufffd" not in text:
                return length
    return 1


# Pages of tokens with their texts, for the token view.


LARGEST = 1000
MARGIN = 3
"""Tokens before and after a page that are detokenized with it, because they may complete a character."""


async def build_token_page(tokens: TokenList, texts: TokenTexts, start: int, count: int, *, overview: bool) -> dict[str, Any]:
    """At most `count` tokens from `start` on: `TokenList.cut`, their texts, and alternatives."""
    start = max(0, min(start, max(0, len(tokens) - 1)))
    lead = min(MARGIN, start)
    ids = tokens.ids[start - lead : start + count + MARGIN].tolist()
    spelled = await texts.spell(tokens.policy, ids)
    shown = tokens.cut(start, count)
    shown["texts"] = spelled.texts[lead : lead + len(shown["ids"])]
    shown["missing"] = spelled.missing
    shown["alternatives"] = await _alternatives(tokens, texts, start, count)
    if overview:
        shown["overview"] = await asyncio.to_thread(tokens.overview)
    return shown


async def _alternatives(tokens: TokenList, texts: TokenTexts, start: int, count: int) -> dict[str, list[list[Any]]]:
    """By position: id, text and logprob of the most probable tokens."""
    found = tokens.alternatives(start, count)
    wanted = list({token for each in found.values() for token, _ in each})
    spelled = await texts.spell_each(tokens.policy, wanted)
    return {
        str(position): [[token, spelled.get(token), logprob] for token, logprob in each] for position, each in found.items()
    }
