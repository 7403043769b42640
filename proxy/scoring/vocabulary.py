"""Whether two engines mean the same by an id.

With the plugin each tells a digest of its whole vocabulary: if they are equal nothing more is asked. Otherwise both spell the ids that
scores are about, those of the rows and the alternatives, each id once for two engines. So a teacher with more tokens than its student
scores what has none of them.
"""

from __future__ import annotations

from collections.abc import Iterable

from proxy.engine.apis.contact import EngineKinds
from proxy.engine.replica import Replica
from proxy.errors import EngineFailed, RequestError


class Vocabularies:
    def __init__(self, kinds: EngineKinds) -> None:
        self._kinds = kinds
        self._alike: dict[tuple[object, ...], set[int]] = {}

    async def check(self, scorer: Replica, sampler: Replica, ids: Iterable[int]) -> None:
        """Raises RequestError if an id has another meaning to the scorer than to the engine that sampled it, EngineUnavailable and
        EngineFailed if an engine cannot tell now."""
        one, other = scorer.host, sampler.host
        if one is other or (one.vocabulary and one.vocabulary == other.vocabulary):
            return
        known = self._alike.setdefault((one.name, one.identity, other.name, other.identity), set())
        if fresh := sorted(set(ids) - known):
            await self._compare(scorer, sampler, fresh)
            known.update(fresh)

    async def _compare(self, scorer: Replica, sampler: Replica, ids: list[int]) -> None:
        groups = [(each,) for each in ids]
        differs = f"engine {scorer.name} has another vocabulary than engine {sampler.name}"
        here = await self._kinds.of(sampler).spell_itself(sampler, groups)
        try:
            there = await self._kinds.of(scorer).spell_itself(scorer, groups)
        except RequestError as error:
            raise RequestError(f"{differs}: {error.message}") from error
        if len(here) != len(ids) or len(there) != len(ids):
            raise EngineFailed(f"engines {scorer.name} and {sampler.name} do not spell each of {len(ids)} ids")
        for token, theirs, own in zip(ids, there, here, strict=True):
            # Some routes show an unfinished character, some leave it out.
            if theirs.rstrip("\ufffd") != own.rstrip("\ufffd"):
                raise RequestError(f"{differs}: the id {token} is {theirs!r} there and {own!r} here")
