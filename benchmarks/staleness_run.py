"""One simulated training run: rollouts, groups, admission, leases, training steps and weight pushes, event by event.

The rules are the service's own. A group is begun while (undelivered groups + groups in training) / groups per version, rounded down,
is at most the bound; the trainer takes the oldest ready groups; one older than the bound is dropped, with all that was sampled for it.
The age of a group is the trainer's version minus the version under which its first reply was asked for.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from benchmarks.staleness_engines import Fleet, Speed

Mode = Literal["synchronous", "keep", "wait"]
"""synchronous: rollouts and training alternate. The others are asynchronous: with `keep` replies go on across a push (partial rollouts),
with `wait` a push waits until no reply is under way, and replies that come meanwhile wait for it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What is rolled out. A rollout has `calls` replies; between two of them its tools take `tool_seconds` (a median). Lengths of
    replies and tool times are lognormal with the given spread, replies at most `longest` tokens."""

    groups_per_version: int
    group_size: int
    calls: int
    reply_tokens: float
    reply_spread: float
    longest: float
    tool_seconds: float = 0.0
    tool_spread: float = 0.0


@dataclass(frozen=True, slots=True)
class Machines:
    """`replicas` of an engine and `trainers`, one machine each. `rollouts`: at once, at most. On the trainers a step takes
    `train_seconds` and `train_token_seconds` for each token in it."""

    replicas: int
    trainers: int
    speed: Speed
    rollouts: int
    train_seconds: float
    train_token_seconds: float
    push_seconds: float

    def shared(self) -> Machines:
        """All machines sample, and then all train: what a synchronous run makes of the same machines. Moving the model from one
        to the other costs nothing here."""
        together = self.replicas + self.trainers
        return replace(
            self,
            replicas=together,
            rollouts=self.rollouts * together // self.replicas,
            train_seconds=self.train_seconds * self.trainers / together,
            train_token_seconds=self.train_token_seconds * self.trainers / together,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """Shares are of the whole run. `engine_use`: tokens sampled of those that full replicas would have sampled; `engine_busy`: time
    with a reply under way. `staleness`: trained groups by age."""

    mode: Mode
    bound: int
    steps: int
    seconds: float
    engine_use: float
    engine_busy: float
    trainer_use: float
    tokens_trained: float
    tokens_dropped: float
    groups_dropped: int
    staleness: dict[int, int]

    @property
    def steps_per_hour(self) -> float:
        return self.steps / self.seconds * 3600


@dataclass(slots=True)
class _Group:
    number: int
    begun_at: int
    left: int
    tokens: float = 0.0


@dataclass(slots=True)
class _Rollout:
    group: _Group
    replies: deque[float]
    pauses: deque[float]


@dataclass(slots=True)
class _Run:
    """The state between two events."""

    mode: Mode
    bound: int
    work: Work
    machines: Machines
    seed: int
    fleet: Fleet
    now: float = 0.0
    version: int = 0
    begun: int = 0
    running: int = 0
    pauses: int = 0
    undelivered: int = 0
    training: int = 0
    trained_seconds: float = 0.0
    tokens_trained: float = 0.0
    tokens_dropped: float = 0.0
    groups_dropped: int = 0
    ready: deque[_Group] = field(default_factory=deque)
    to_start: deque[_Rollout] = field(default_factory=deque)
    thinking: list[tuple[float, int, _Rollout]] = field(default_factory=list)
    step_ends: float = math.inf
    push_ends: float = math.inf
    draining: bool = False
    ages: Counter[int] = field(default_factory=Counter)


def simulate(mode: Mode, bound: int, work: Work, machines: Machines, *, steps: int, seed: int = 0) -> Outcome:
    """`steps` training steps and their pushes. Equal seeds roll out equal groups, whatever the mode."""
    run = _Run(mode, bound, work, machines, seed, Fleet(machines.replicas, machines.speed))
    while run.version < steps:
        _begin_rollouts(run)
        _begin_step(run)
        moment = min(run.fleet.next_end, run.thinking[0][0] if run.thinking else math.inf, run.step_ends, run.push_ends)
        if math.isinf(moment):
            raise RuntimeError(
                f"nothing will ever happen any more: {run.undelivered} groups undelivered at version {run.version}"
            )
        run.fleet.move_to(moment)
        run.now = moment
        _happen(run)
    return _outcome(run, steps)


def _happen(run: _Run) -> None:
    """All that is due now."""
    for rollout in list(run.fleet.ended()):
        _reply_ended(run, rollout)
    while run.thinking and run.thinking[0][0] <= run.now:
        rollout = heapq.heappop(run.thinking)[2]
        run.fleet.start(rollout.replies[0], rollout)
    if run.step_ends <= run.now:
        _begin_push(run)
    if run.draining and run.fleet.drained:
        run.draining = False
        _pause(run)
    if run.push_ends <= run.now:
        _end_push(run)


def _begin_rollouts(run: _Run) -> None:
    while run.running < run.machines.rollouts:
        if not run.to_start and not _begin_group(run):
            return
        rollout = run.to_start.popleft()
        run.running += 1
        run.fleet.start(rollout.replies[0], rollout)


def _begin_group(run: _Run) -> bool:
    """Whether the next group may be begun."""
    if run.mode == "synchronous":
        # A batch is rolled out whole, then trained on.
        admitted = run.begun < (run.version + 1) * run.work.groups_per_version
    else:
        admitted = (run.undelivered + run.training) // run.work.groups_per_version <= run.bound
    if admitted:
        group = _Group(run.begun, run.version, run.work.group_size)
        run.to_start.extend(_rollouts_of(group, run.work, run.seed))
        run.begun += 1
        run.undelivered += 1
    return admitted


def _rollouts_of(group: _Group, work: Work, seed: int) -> list[_Rollout]:
    random = np.random.default_rng((seed, group.number))
    shape = (work.group_size, work.calls)
    lengths = np.clip(np.round(work.reply_tokens * random.lognormal(0.0, work.reply_spread, shape)), 1, work.longest)
    pauses = work.tool_seconds * random.lognormal(0.0, work.tool_spread, shape)
    return [
        _Rollout(group, deque(replies), deque(waits)) for replies, waits in zip(lengths.tolist(), pauses.tolist(), strict=True)
    ]


def _reply_ended(run: _Run, rollout: _Rollout) -> None:
    rollout.group.tokens += rollout.replies.popleft()
    if rollout.replies:
        run.pauses += 1
        heapq.heappush(run.thinking, (run.now + rollout.pauses.popleft(), run.pauses, rollout))
        return
    run.running -= 1
    rollout.group.left -= 1
    if not rollout.group.left:
        run.ready.append(rollout.group)


def _begin_step(run: _Run) -> None:
    wanted = run.work.groups_per_version
    if run.training or len(run.ready) < wanted:
        return
    _drop_stale(run)
    if len(run.ready) < wanted:
        _begin_rollouts(run)
        return
    batch = [run.ready.popleft() for _ in range(wanted)]
    run.undelivered -= wanted
    run.training = wanted
    run.ages.update(run.version - group.begun_at for group in batch)
    tokens = sum(group.tokens for group in batch)
    run.tokens_trained += tokens
    seconds = run.machines.train_seconds + tokens * run.machines.train_token_seconds
    run.trained_seconds += seconds
    run.step_ends = run.now + seconds


def _drop_stale(run: _Run) -> None:
    fresh = [group for group in run.ready if run.version - group.begun_at <= run.bound]
    dropped = len(run.ready) - len(fresh)
    run.tokens_dropped += sum(group.tokens for group in run.ready) - sum(group.tokens for group in fresh)
    run.groups_dropped += dropped
    run.undelivered -= dropped
    run.ready = deque(fresh)


def _begin_push(run: _Run) -> None:
    run.step_ends = math.inf
    run.fleet.close(True)
    if run.mode == "wait" and not run.fleet.drained:
        run.draining = True
    else:
        _pause(run)


def _pause(run: _Run) -> None:
    run.fleet.freeze(True)
    run.push_ends = run.now + run.machines.push_seconds


def _end_push(run: _Run) -> None:
    run.push_ends = math.inf
    run.version += 1
    run.training = 0
    run.fleet.freeze(False)
    run.fleet.close(False)


def _outcome(run: _Run, steps: int) -> Outcome:
    whole = run.now * run.machines.replicas
    return Outcome(
        mode=run.mode,
        bound=run.bound,
        steps=steps,
        seconds=run.now,
        engine_use=run.fleet.sampled / (whole * run.machines.speed.most),
        engine_busy=run.fleet.busy_seconds / whole,
        trainer_use=run.trained_seconds / run.now,
        tokens_trained=run.tokens_trained,
        tokens_dropped=run.tokens_dropped,
        groups_dropped=run.groups_dropped,
        staleness=dict(sorted(run.ages.items())),
    )
