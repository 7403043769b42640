"""TokenSource: the tokens of one call or of one row, with what is known of each, in arrays; and pages cut from it.

Which ids they are and who sampled them is read off the session's forest and rows. Nothing here puts a context together itself.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from proxy.engine.pool.pool import EnginePool
from proxy.engine.replica import Replica
from proxy.errors import EngineUnavailable, VerbatimError
from proxy.ui.look import Look
from reconstruct.forest import Forest
from reconstruct.records import Call, Ids, Logprobs
from reconstruct.trajectory import Trajectory

GIVEN, TRAINED, CONTEXT, WITHHELD = range(4)
"""What a token is here: given to the model; sampled, with mask 1; sampled elsewhere, with mask 0; sampled here and quarantined."""
NO_VERSION = -1
BINS = 160
"""Parts of the overview."""


@dataclass(frozen=True, slots=True)
class TokenSource:
    """All arrays are of one length. `logprobs` is NaN where nothing was sampled, `versions` NO_VERSION. `policy` says whose vocabulary
    it is. `alternatives`: by position, the most probable tokens where the engine told them."""

    ids: Ids
    kinds: NDArray[np.uint8]
    logprobs: Logprobs
    versions: NDArray[np.int64]
    policy: str
    tops: tuple[tuple[int, Call], ...] = ()

    def __len__(self) -> int:
        return len(self.ids)

    def after(self, position: int, what: str, value: float | None = None) -> int | None:
        """The first position behind `position` with a surprise (a logprob below `value`), another version, another kind, or the id
        `value`; None: there is none."""
        # Before the first token there is nothing that it could differ from.
        position = max(position, 0) if what == "kind" else position
        rest = slice(position + 1, None)
        if what == "surprise":
            found = self.logprobs[rest] < (-3.0 if value is None else value)
        elif what == "id":
            found = self.ids[rest] == value
        elif what == "version":
            # From one version to another, whatever was given in between.
            last = _last_known(self.versions, position)
            found = (self.versions[rest] != NO_VERSION) & (self.versions[rest] != last)
        else:
            found = self.kinds[rest] != self.kinds[position:-1]
        hits = np.flatnonzero(found)
        return position + 1 + int(hits[0]) if len(hits) else None

    def overview(self) -> list[list[float | int | None]]:
        """For each of at most BINS equal parts: its first position, the share of sampled tokens, the mean logprob of those."""
        edges = np.linspace(0, len(self), min(BINS, len(self)) + 1).astype(int) if len(self) else np.zeros(1, dtype=int)
        bins: list[list[float | int | None]] = []
        for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
            sampled = self.kinds[start:end] != GIVEN
            logprobs = self.logprobs[start:end][sampled]
            mean = round(float(np.mean(logprobs)), 3) if len(logprobs) and np.isfinite(logprobs).all() else None
            bins.append([start, round(float(sampled.mean()), 3), mean])
        return bins

    def page(self, start: int, count: int) -> dict[str, Any]:
        """The tokens from `start` on without their texts: ids, kinds as digits, logprobs (None: not sampled), runs of versions."""
        part = slice(start, start + count)
        return {
            "start": start,
            "total": len(self),
            "ids": self.ids[part].tolist(),
            "kinds": "".join(map(str, self.kinds[part].tolist())),
            "logprobs": [None if np.isnan(each) else round(float(each), 4) for each in self.logprobs[part]],
            "versions": version_runs(self.versions[part]),
        }

    def alternatives(self, start: int, count: int) -> dict[int, list[tuple[int, float]]]:
        """The most probable tokens and their logprobs, by position, as far as the engine told them."""
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


def call_tokens(look: Look, call: Call) -> TokenSource:
    """The prompt of a call and what it sampled."""
    own = TRAINED if call.call_id not in look.refused else WITHHELD
    if call.call_id not in look.forest:
        # Of a call without a place in the tree only what it stores itself is known.
        return _stray_tokens(call)
    source = _source(look.forest, call.call_id)
    source.kinds[look.forest.prompt_length(call.call_id) :] = own
    return replace(source, tops=_tops(look.forest, [call]))


def row_tokens(look: Look, row: Trajectory) -> TokenSource:
    """The tokens of a row under its own mask."""
    source = _source(look.forest, row.call_ids[-1])
    kinds = np.where(row.loss_mask == 1, np.uint8(TRAINED), source.kinds).astype(np.uint8)
    trained = [look.forest.calls[call_id] for call_id in row.call_ids]
    return replace(source, kinds=kinds, tops=_tops(look.forest, trained))


def version_runs(versions: NDArray[np.int64]) -> list[list[int]]:
    """[version, start, end] of each run of one version, positions counted from the array's start; what has none is left out."""
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)]
    return [
        [int(versions[start]), start, end] for start, end in pairwise(edges) if start < end and versions[start] != NO_VERSION
    ]


def _source(forest: Forest, last: str) -> TokenSource:
    """Everything up to the end of the call `last`: what was sampled is context, all else given."""
    length = forest.full_length(last)
    kinds = np.zeros(length, dtype=np.uint8)
    logprobs = np.full(length, np.nan, dtype=np.float32)
    versions = np.full(length, NO_VERSION, dtype=np.int64)
    for owner, start, end in forest.pieces(last, length):
        node = forest.calls[owner].node
        said = node.base_length + len(node.delta_ids)
        first, count = max(start, said), end - max(start, said)
        if count <= 0:
            continue
        offset = first - said
        kinds[first:end] = CONTEXT
        if len(node.logprobs) == len(node.completion_ids):
            logprobs[first:end] = node.logprobs[offset : offset + count]
        for span in node.spans:
            versions[max(first, said + span.start) : min(end, said + span.end)] = span.version
    return TokenSource(forest.full_ids(last), kinds, logprobs, versions, forest.calls[last].policy)


def _stray_tokens(call: Call) -> TokenSource:
    node = call.node
    ids = np.concatenate((node.delta_ids, node.completion_ids))
    said = len(node.delta_ids)
    logprobs = np.full(len(ids), np.nan, dtype=np.float32)
    if len(node.logprobs) == len(node.completion_ids):
        logprobs[said:] = node.logprobs
    versions = np.full(len(ids), NO_VERSION, dtype=np.int64)
    for span in node.spans:
        versions[said + span.start : said + span.end] = span.version
    kinds = np.where(np.arange(len(ids)) < said, GIVEN, WITHHELD).astype(np.uint8)
    return TokenSource(ids, kinds, logprobs, versions, call.policy)


def _tops(forest: Forest, calls: Iterable[Call]) -> tuple[tuple[int, Call], ...]:
    return tuple(
        (forest.prompt_length(call.call_id), call)
        for call in calls
        if call.node.details is not None and call.node.details.top_token_ids is not None
    )


def _last_known(versions: NDArray[np.int64], position: int) -> int:
    known = np.flatnonzero(versions[: position + 1] != NO_VERSION)
    return int(versions[known[-1]]) if len(known) else NO_VERSION


# TokenTexts: the text of token ids, from the engine's own tokenizer, cached, since a text depends on its ids alone.
#
# vLLM's token path spells many groups of ids in one request; a local renderer's tokenizer is used if there is one; other engines are asked
# at `/detokenize`, group by group. A token that is part of a character has no text of its own; up to four in a row that make one are
# spelled together.


REMEMBERED = 400_000
"""Groups whose text is kept, of all vocabularies."""
AT_ONCE = 1024
"""Groups in one request."""
CHARACTER_BYTES = 4
"""The longest character, which byte tokens may spell one by one."""
AGAIN_SECONDS = 30.0
"""How soon an engine that could not spell is asked again."""

Group = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Texts:
    """One text per token; None where nobody can tell it, with the reason in `missing`. Of tokens that make one character together the
    first has its text and the others have ""."""

    texts: list[str | None]
    missing: str = ""


class TokenTexts:
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool
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
                texts = await self._pool.kinds.of(replica).spell(replica, part)
            except VerbatimError as error:
                why = f"the engine does not spell tokens: {error.message}"
                self._silent[replica.name] = (time.monotonic() + AGAIN_SECONDS, why)
                raise EngineUnavailable(why) from error
            told.update(zip(part, texts, strict=True))
        self._known.update(((vocabulary, group), told[group]) for group in new)
        while len(self._known) > REMEMBERED:
            self._known.popitem(last=False)
        return told


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


# Pages of tokens with their texts, for the token view.


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
