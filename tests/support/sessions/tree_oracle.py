"""A brute-force oracle of the training rows of a session, from whole prompts. It shares no code with `reconstruct`.

It is told each call as it was: everything the model saw, everything it said. It knows nothing of bases, deltas or hashes, walks
every prompt id by id, and is as slow as that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Told:
    """One call as it was. `leans_on` are the calls its record names, `flaw` is what is wrong with the record ("" for nothing)
    and `lost` tells that the store does not have it."""

    call_id: str
    prompt: tuple[int, ...]
    said: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[int, ...]
    parent: str | None
    leans_on: frozenset[str]
    started_at: float
    finish_reason: str = "stop"
    flaw: str = ""
    lost: bool = False
    role: str = "main"


@dataclass(frozen=True)
class Row:
    """One expected row; per token: the id, whether it is trained, its logprob and its weight version (None where masked)."""

    call_ids: tuple[str, ...]
    token_ids: tuple[int, ...]
    loss_mask: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int | None, ...]
    finish_reason: str
    role: str


class Oracle:
    """`untrained` are the roles whose calls are shown in rows of their own, with nothing to train."""

    def __init__(self, told: Sequence[Told], untrained: frozenset[str] = frozenset()) -> None:
        self.stored = {item.call_id: item for item in told if not item.lost}
        self.in_order = sorted(self.stored.values(), key=lambda item: (item.started_at, item.call_id))
        self.homeless = self._homeless()
        self.refused = dict.fromkeys(self.homeless, "unknown_parent")
        for item in self.in_order:
            reason = self._reason(item)
            if item.call_id not in self.homeless and reason:
                self.refused[item.call_id] = reason
        self.shown = {item.call_id for item in self.in_order if item.call_id not in self.refused and item.role in untrained}
        self.refused |= {name: f"role_{self.stored[name].role}" for name in self.shown}

    def extends(self, item: Told) -> bool:
        """Whether the model saw all of the parent's ids, the reply included, before anything else."""
        if item.parent is None or item.parent in self.homeless or item.parent not in self.stored:
            return False
        parent = self.stored[item.parent]
        if parent.flaw == "no_token_ids":
            return False
        whole = parent.prompt + parent.said
        return len(item.prompt) >= len(whole) and all(item.prompt[at] == whole[at] for at in range(len(whole)))

    def sampled(self) -> int:
        return sum(len(item.said) for item in self.stored.values())

    def quarantined(self) -> list[tuple[str, int, str]]:
        return [
            (item.call_id, len(item.said), self.refused[item.call_id]) for item in self.in_order if item.call_id in self.refused
        ]

    def per_call(self) -> list[Row]:
        seen = [item for item in self.in_order if self._trainable(item) or self._showable(item)]
        return [self._row([item], {item.call_id} - self.refused.keys()) for item in seen]

    def merged(self) -> list[Row]:
        """One row per trainable call that is on no other trainable call's way, and one per shown call that is on no way at all.
        The first row to run through a trainable call trains it; a shown call's row trains nothing."""
        trainable = [item for item in self.in_order if self._trainable(item)]
        shown = [item for item in self.in_order if self._showable(item)]
        ends = [item for item in trainable if item.call_id not in self._passed(trainable)]
        ends += [item for item in shown if item.call_id not in self._passed(trainable + shown)]
        done: set[str] = set()
        rows = []
        for end in sorted(ends, key=lambda item: (item.started_at, item.call_id)):
            way = self.way(end)
            trained = {step.call_id for step in way if self._trainable(step)} - done if self._trainable(end) else set()
            done |= trained
            rows.append(self._row(way, trained))
        return rows

    def _passed(self, ends: Sequence[Told]) -> set[str]:
        return {step.call_id for end in ends for step in self.way(end)[:-1]}

    def way(self, item: Told) -> list[Told]:
        """The call, preceded by its parent as long as the one extends the other."""
        way = [item]
        while self.extends(way[0]):
            assert way[0].parent is not None
            way.insert(0, self.stored[way[0].parent])
        return way

    def _homeless(self) -> set[str]:
        """Calls that lean, over any number of steps, on a call whose record is lost."""
        homeless: set[str] = set()
        for _ in self.stored:
            for item in self.stored.values():
                if any(name not in self.stored or name in homeless for name in item.leans_on):
                    homeless.add(item.call_id)
        return homeless

    def _reason(self, item: Told) -> str:
        if item.flaw in ("placeholder_sampled", "no_token_ids"):
            return item.flaw
        if any(logprob is None for logprob in item.logprobs):
            return "missing_logprob"
        return item.flaw

    def _trainable(self, item: Told) -> bool:
        return item.call_id not in self.refused and len(item.said) > 0

    def _showable(self, item: Told) -> bool:
        return item.call_id in self.shown and len(item.said) > 0

    def _row(self, way: Sequence[Told], trained: set[str]) -> Row:
        last = way[-1]
        token_ids = list(last.prompt + last.said)
        mask, logprobs = [0] * len(token_ids), [0.0] * len(token_ids)
        versions: list[int | None] = [None] * len(token_ids)
        for item in way:
            for at in range(len(item.said)):
                if item.call_id in trained:
                    logprob = item.logprobs[at]
                    assert logprob is not None
                    position = len(item.prompt) + at
                    mask[position], logprobs[position], versions[position] = 1, logprob, item.versions[at]
        calls = tuple(item.call_id for item in way)
        return Row(calls, tuple(token_ids), tuple(mask), tuple(logprobs), tuple(versions), last.finish_reason, last.role)
