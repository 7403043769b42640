"""The verdict: what must be true at the end of the loop, as numbers first and as failures second."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

ENDS = 4
"""How many rounds at the start and at the end are averaged to tell the rise."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """`rise`: by how much the mean reward must grow with the push, and may not without. `difference`: the largest
    |stored - recomputed logprob| allowed. `push`: whether the trainer's weights reached the engine."""

    push: bool
    rise: float
    difference: float


@dataclass(frozen=True, slots=True)
class Verdict:
    sessions: int
    calls: int
    rows: int
    sampled_tokens: int
    exported_tokens: int
    quarantined_tokens: int
    quarantine_reasons: Mapping[str, int]
    agent_tokens: int
    recomputed_tokens: int
    largest_difference: float
    weight_versions: Sequence[int]
    mixed_rows: int
    trained_tokens: int
    rewards: Sequence[float]

    @property
    def rows_per_conversation(self) -> float:
        return self.rows / self.sessions

    @property
    def first_reward(self) -> float:
        return _mean(self.rewards[:ENDS])

    @property
    def last_reward(self) -> float:
        return _mean(self.rewards[-ENDS:])

    @property
    def rise(self) -> float:
        return self.last_reward - self.first_reward

    def failures(self, expected: Expectation) -> list[str]:
        """One sentence for each expectation that does not hold."""
        kept = self.exported_tokens + self.quarantined_tokens
        least, versions = len(self.rewards) - 2, len(self.weight_versions)
        checks = [
            (self.sampled_tokens > 0, "no token was sampled"),
            (
                self.sampled_tokens == kept,
                f"{self.sampled_tokens} tokens were sampled but {kept} are exported or quarantined",
            ),
            (
                # A reply that broke off on the way is sampled and in quarantine, but the agent never heard of it.
                self.exported_tokens <= self.agent_tokens <= self.sampled_tokens,
                f"the agent was told of {self.agent_tokens} tokens, {self.exported_tokens} are exported "
                f"and {self.sampled_tokens} were sampled",
            ),
            (
                self.recomputed_tokens == self.exported_tokens,
                f"{self.exported_tokens} tokens are exported but {self.recomputed_tokens} lie in a weight version's span",
            ),
            (
                self.largest_difference < expected.difference,
                f"a stored logprob is {self.largest_difference:.2e} off the recomputed one, allowed is {expected.difference:g}",
            ),
            (
                self.trained_tokens == self.exported_tokens,
                f"the trainer was given {self.trained_tokens} tokens, {self.exported_tokens} are exported",
            ),
        ]
        if expected.push:
            checks += [
                (versions >= least, f"the tokens know {versions} weight versions, at least {least} were expected"),
                (self.rise >= expected.rise, f"the reward rose by {self.rise:.3f}, at least {expected.rise:g} was expected"),
            ]
        else:
            checks += [
                (list(self.weight_versions) == [0], f"nothing was pushed, yet there are versions {self.weight_versions}"),
                (abs(self.rise) < expected.rise, f"nothing was pushed, yet the reward changed by {self.rise:.3f}"),
            ]
        return [sentence for holds, sentence in checks if not holds]


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One session as the service tells it at the end: its number of calls and its answer to GET …/trajectories."""

    calls: int
    trajectories: Sequence[Mapping[str, Any]]
    accounting: Mapping[str, Any]


def judge(
    sessions: Sequence[SessionFacts],
    rewards: Sequence[float],
    *,
    agent_tokens: int,
    trained_tokens: int,
    recomputed_tokens: int,
    largest_difference: float,
) -> Verdict:
    """The numbers of all sessions together. Exported tokens are counted in the rows, not taken from the accounting."""
    rows = [row for session in sessions for row in session.trajectories]
    reasons: dict[str, int] = {}
    for item in (item for session in sessions for item in session.accounting["quarantined"]):
        reasons[item["reason"]] = reasons.get(item["reason"], 0) + item["tokens"]
    versions = [{version for version, _, _ in row["weight_versions"]} for row in rows]
    return Verdict(
        sessions=len(sessions),
        calls=sum(session.calls for session in sessions),
        rows=len(rows),
        sampled_tokens=sum(session.accounting["sampled_tokens"] for session in sessions),
        exported_tokens=sum(sum(row["loss_mask"]) for row in rows),
        quarantined_tokens=sum(reasons.values()),
        quarantine_reasons=reasons,
        agent_tokens=agent_tokens,
        recomputed_tokens=recomputed_tokens,
        largest_difference=largest_difference,
        weight_versions=sorted(set().union(*versions)),
        mixed_rows=sum(len(found) > 1 for found in versions),
        trained_tokens=trained_tokens,
        rewards=list(rewards),
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
