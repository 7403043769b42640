"""Whether two policies mean the same by an id: a score of other tokens than were sampled would look like any other number."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from proxy.engine.apis.contact import EngineKinds
from proxy.engine.replica import Replica
from proxy.errors import RequestError

MOST_COMPARED = 512
"""Ids that are spelled by both."""


class Vocabularies:
    """Compares those of each two engines once: both spell ids of a session, and ids spread over the range in between."""

    def __init__(self, kinds: EngineKinds) -> None:
        self._kinds = kinds
        self._alike: dict[tuple[object, ...], str] = {}

    async def check(self, scorer: Replica, sampler: Replica, ids: Iterable[int]) -> None:
        """Raises RequestError if an id has another meaning to the scorer than to the engine that sampled it, EngineUnavailable and
        EngineFailed if an engine cannot tell now."""
        if scorer.host is sampler.host:
            return
        pair = (scorer.host.name, scorer.host.identity, sampler.host.name, sampler.host.identity)
        if pair not in self._alike:
            self._alike[pair] = await self._compare(scorer, sampler, _choose(ids))
        if difference := self._alike[pair]:
            raise RequestError(difference)

    async def _compare(self, scorer: Replica, sampler: Replica, probes: Sequence[int]) -> str:
        """What differs; "" if nothing does."""
        groups = [(each,) for each in probes]
        own = await self._kinds.of(sampler).spell(sampler, groups)
        try:
            theirs = await self._kinds.of(scorer).spell(scorer, groups)
        except RequestError as error:
            return f"engine {scorer.name} has another vocabulary than engine {sampler.name}: {error.message}"
        for token, mine, other in zip(probes, own, theirs, strict=True):
            if mine != other:
                return (
                    f"engine {scorer.name} has another vocabulary than engine {sampler.name}: the id {token} is {other!r} there and "
                    f"{mine!r} here"
                )
        return ""


def _choose(ids: Iterable[int]) -> list[int]:
    known = sorted(set(ids))
    step = max(1, len(known) // (MOST_COMPARED // 2))
    spread = range(0, known[-1] + 1, max(1, (known[-1] + 1) // (MOST_COMPARED // 2))) if known else ()
    return sorted({*known[::step], *spread})
