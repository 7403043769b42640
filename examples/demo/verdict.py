"""The verdict: what must be true at the end of the loop, as numbers first and as failures second."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from examples.demo.engine_use import Stint, idle_shares

MIN_HELD_OUT = 24
"""With at least this many held-out exercises, the rise is theirs; with fewer, that of the steps, each of which has exercises of its own."""

Check = tuple[bool, str]
"""Whether it holds, and the sentence for when it does not."""


@dataclass(frozen=True, slots=True)
class Expectation:
    """`rise`: by how much the mean reward must grow, or with a control may not change. `difference`: the largest
    |stored - recomputed logprob| allowed. `push`: whether the trainer's weights reached the engine. `shuffled`: whether each rollout
    was trained on with the reward of another. `asynchronous`: the agents may have sampled what no step took any more."""

    push: bool
    rise: float
    difference: float
    replicas: int = 1
    asynchronous: bool = False
    max_staleness: int = 2
    shuffled: bool = False

    @property
    def control(self) -> str:
        """Why the reward is to stay flat; empty when it is to rise."""
        return "nothing was pushed" if not self.push else "the rewards were shuffled" if self.shuffled else ""


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
    untrained_tokens: int
    ages: Mapping[int, int]
    idle: Mapping[str, float]
    rewards: Sequence[float]
    ends: tuple[int, int] = (4, 4)
    """How many steps at the start and at the end are averaged to tell the rise."""
    held_out: Sequence[Sequence[float]] = ()
    """The rewards of held-out exercises, before and after."""
    differing_tensors: Sequence[str] = ()
    """Names of those that the engines' mirror holds otherwise than the trainer, after pushes of deltas."""

    @property
    def rows_per_conversation(self) -> float:
        return self.rows / self.sessions

    @property
    def first_reward(self) -> float:
        return _mean(self.rewards[: self.ends[0]])

    @property
    def last_reward(self) -> float:
        return _mean(self.rewards[-self.ends[1] :])

    @property
    def has_two_ends(self) -> bool:
        """Whether there are steps or held-out exercises enough to speak of a rise."""
        return self._has_held_out or len(self.rewards) >= 2 * max(self.ends)

    @property
    def rise(self) -> float:
        before, after = map(_mean, self.held_out) if self._has_held_out else (self.first_reward, self.last_reward)
        return after - before

    @property
    def _has_held_out(self) -> bool:
        return min(map(len, self.held_out), default=0) >= MIN_HELD_OUT

    @property
    def course(self) -> str:
        """In words: whether the reward rose. Before there are steps enough, what it was."""
        steps = len(self.rewards)
        if self._has_held_out:
            before, after = map(_mean, self.held_out)
            return f"Of {len(self.held_out[0])} held-out exercises {before:.1%} were solved before and {after:.1%} after {steps} steps."
        if not self.has_two_ends:
            first, last = (self.rewards[0], self.rewards[-1]) if steps else (0.0, 0.0)
            return f"The reward was {first:.3f} in the first of {steps} steps and {last:.3f} in the last: too few to speak of a rise."
        way = "rose" if self.rise > 0 else "did not rise: it went"
        ends = f"from {self.first_reward:.3f} to {self.last_reward:.3f}"
        return f"The reward {way} {ends} over {steps} steps (means of the first {self.ends[0]} and the last {self.ends[1]})."

    def failures(self, expected: Expectation) -> list[str]:
        """One sentence for each expectation that does not hold."""
        checks = (*self._as_sampled(expected), *self._as_trained(expected), *self._as_learned(expected))
        return [sentence for holds, sentence in checks if not holds]

    def _as_sampled(self, expected: Expectation) -> Iterator[Check]:
        kept = self.exported_tokens + self.quarantined_tokens
        yield self.sampled_tokens > 0, "no token was sampled"
        yield self.sampled_tokens == kept, f"{self.sampled_tokens} tokens were sampled but {kept} are exported or quarantined"
        yield (
            # A reply that broke off on the way is sampled and in quarantine, but the agent never heard of it.
            self.exported_tokens <= self.agent_tokens <= self.sampled_tokens,
            f"the agent was told of {self.agent_tokens} tokens, {self.exported_tokens} are exported "
            f"and {self.sampled_tokens} were sampled",
        )
        yield (
            self.recomputed_tokens == self.exported_tokens,
            f"{self.exported_tokens} tokens are exported but {self.recomputed_tokens} lie in a weight version's span",
        )
        yield (
            self.largest_difference < expected.difference,
            f"a stored logprob is {self.largest_difference:.2e} off the recomputed one, allowed is {expected.difference:g}",
        )
        yield len(self.idle) == expected.replicas, f"{len(self.idle)} replicas sampled, {expected.replicas} were expected"

    def _as_trained(self, expected: Expectation) -> Iterator[Check]:
        oldest = max(self.ages, default=0)
        yield (
            self.trained_tokens + self.untrained_tokens == self.exported_tokens,
            f"the trainer was given {self.trained_tokens} tokens and {self.untrained_tokens} are in sessions that no step took, "
            f"{self.exported_tokens} are exported",
        )
        yield expected.asynchronous or not self.untrained_tokens, f"no step took {self.untrained_tokens} of the tokens"
        yield (
            oldest <= expected.max_staleness,
            f"the trainer took a group {oldest} versions old, allowed are {expected.max_staleness}",
        )

    def _as_learned(self, expected: Expectation) -> Iterator[Check]:
        least, versions = len(self.rewards) - 2, list(self.weight_versions)
        if expected.push:
            yield len(versions) >= least, f"the tokens know {len(versions)} weight versions, at least {least} were expected"
        else:
            yield versions == [0], f"nothing was pushed, yet there are versions {versions}"
        yield not self.differing_tensors, f"the engines hold other bits than the trainer in {', '.join(self.differing_tensors)}"
        if self.has_two_ends and expected.control:
            yield abs(self.rise) < expected.rise, f"{expected.control}, yet the reward changed by {self.rise:.3f}"
        elif self.has_two_ends:
            yield self.rise >= expected.rise, f"the reward rose by {self.rise:.3f}, at least {expected.rise:g} was expected"


@dataclass(frozen=True, slots=True)
class SessionFacts:
    """One session as the service tells it at the end: its number of calls, their times at the replicas, and its answer to GET
    …/trajectories. `trained`: a training step took it."""

    calls: int
    stints: Sequence[Stint]
    trajectories: Sequence[Mapping[str, Any]]
    accounting: Mapping[str, Any]
    trained: bool

    @property
    def exported_tokens(self) -> int:
        """Counted in the rows, not taken from the accounting."""
        return sum(sum(row["loss_mask"]) for row in self.trajectories)


def judge(
    sessions: Sequence[SessionFacts],
    rewards: Sequence[float],
    ages: Mapping[int, int],
    *,
    agent_tokens: int,
    trained_tokens: int,
    recomputed_tokens: int,
    largest_difference: float,
    ends: tuple[int, int] = (4, 4),
    held_out: Sequence[Sequence[float]] = (),
    differing_tensors: Sequence[str] = (),
) -> Verdict:
    """The numbers of all sessions together. `rewards` are the mean ones by training step, `ages` the groups that were trained on, by
    versions behind; `held_out` the rewards of held-out exercises before and after, `differing_tensors` what engines
    hold otherwise than the trainer."""
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
        exported_tokens=sum(session.exported_tokens for session in sessions),
        quarantined_tokens=sum(reasons.values()),
        quarantine_reasons=reasons,
        agent_tokens=agent_tokens,
        recomputed_tokens=recomputed_tokens,
        largest_difference=largest_difference,
        weight_versions=sorted(set().union(*versions)),
        mixed_rows=sum(len(found) > 1 for found in versions),
        trained_tokens=trained_tokens,
        untrained_tokens=sum(session.exported_tokens for session in sessions if not session.trained),
        ages=dict(sorted(ages.items())),
        idle=idle_shares(stint for session in sessions for stint in session.stints),
        rewards=list(rewards),
        ends=ends,
        held_out=held_out,
        differing_tensors=differing_tensors,
    )


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
