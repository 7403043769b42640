"""The trainer of a pretrained policy: GRPO, or distillation from a teacher's scores, in steps, which a killed run goes on with.

A step submits its tasks, leases the groups they become, recomputes their logprobs, learns from them, and puts weights and optimizer aside;
its line in the journal makes it done. Only then are the weights pushed and the groups acknowledged. So each step is sampled by one version.
Exercises and chance follow from the seed and the step's number: nothing else has to be kept. Started again, the trainer takes up the last
step that is done; what was leased but not acknowledged comes again, and groups of steps that are done are acknowledged unread.
"""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any

import httpx
import numpy as np
import typer

from examples.demo.plan import TEACHER
from examples.demo.trainer import ModelDir, Recipe, Url, WeightsDir
from examples.learn.agents import AGENTS, CliAgent, make_task
from examples.learn.exercises import KINDS
from examples.learn.trainer import shuffle_rewards
from examples.pretrained.journal import Journal
from examples.pretrained.policy import Policy
from examples.pretrained.varied import draw_varied
from examples.tasks_loop.trainer import connected, explain_absence
from trainer_client import Batch, Group, TrainerClient, prune_versions, version_folder, write_weights
from trainer_client.advantages import grpo

KEPT = 2
"""Versions: the one that is served, and the one before."""
OPTIMIZER = "optimizer.pt"


@dataclass(frozen=True, slots=True)
class Rules:
    """`held_out` exercises are tried before the first step, after every `held_out_every` and after the last. `taught`: what teaches are
    the scores by TEACHER, not rewards; `shuffled`: other tokens', or other rollouts'."""

    agent: CliAgent
    steps: int
    groups: int
    rollouts: int
    held_out: int
    held_out_every: int
    seed: int
    push: bool
    shuffled: bool
    taught: bool

    def make_tasks(self, step: int) -> list[dict[str, Any]]:
        exercises = draw_varied(random.Random(f"exercises {self.seed} {step}"), "train")
        scores = {"scores": [TEACHER]} if self.taught else {}
        names = [f"step-{step}-{number}" for number in range(self.groups)]
        return [make_task(name, next(exercises), self.agent, self.rollouts) | scores for name in names]

    def make_held_out_tasks(self, step: int) -> list[dict[str, Any]]:
        """The same exercises at every step and for every seed."""
        exercises = islice(draw_varied(random.Random("held-out"), "held-out"), self.held_out)
        return [make_task(f"held-out-{step}-{number}", exercise, self.agent, 1) for number, exercise in enumerate(exercises)]

    def tries_held_out_after(self, step: int) -> bool:
        return step == self.steps or step % self.held_out_every == 0


class Training:
    """`checkpoints` has the optimizer of each version whose weights are in `weights_dir`."""

    def __init__(
        self,
        rules: Rules,
        policy: Policy,
        journal: Journal,
        weights_dir: Path,
        checkpoints: Path,
        admin: httpx.Client,
        client: TrainerClient,
    ) -> None:
        self._rules = rules
        self._policy = policy
        self._journal = journal
        self._weights_dir = weights_dir
        self._checkpoints = checkpoints
        self._admin = admin
        self._client = client

    def run(self) -> None:
        """From the step after the last that is done to the last one."""
        done = self._journal.done
        if done and self._rules.push and self._client.weights()["current"]["version"] < done:
            self._push(done)
        for step in range(done, self._rules.steps + 1):
            if step > done:
                self._take(step)
            tried = {line["step"] for line in self._journal.read("held-out")}
            if self._rules.tries_held_out_after(step) and step not in tried:
                self._try_held_out(step)

    def _take(self, step: int) -> None:
        watch = Stopwatch()
        bodies = self._rules.make_tasks(step)
        self._submit(bodies)
        with self._gathered(bodies) as batch:
            watch.stop("sample")
            difference = self._policy.recompute(batch)
            compared = {"recomputed_tokens": difference.tokens, "largest_difference": difference.largest}
            watch.stop("recompute")
            learned = self._learn(batch, step)
            watch.stop("learn")
            self._put_aside(step)
            watch.stop("save")
            told = self._tell(bodies, batch)
            self._journal.add("step", step, **told, **learned, **compared, seconds=watch.seconds)
            if self._rules.push:
                self._push(step)
        for folder in (self._weights_dir, self._checkpoints):
            prune_versions(folder, step, KEPT)

    def _learn(self, batch: Batch, step: int) -> dict[str, float]:
        chance = random.Random(f"chance {self._rules.seed} {step}")
        if self._rules.taught:
            return self._policy.distil(
                batch, TEACHER, np.random.default_rng(chance.getrandbits(32)) if self._rules.shuffled else None
            )
        return self._policy.reinforce(batch, batch.advantages(shuffle_rewards(grpo, chance) if self._rules.shuffled else grpo))

    def _put_aside(self, step: int) -> None:
        write_weights(self._policy.weights(), self._weights_dir, step)
        with version_folder(self._checkpoints, step) as folder:
            self._policy.save_optimizer(folder.unfinished / OPTIMIZER)

    def _push(self, step: int) -> None:
        push = self._client.publish(self._weights_dir / f"version-{step}", step)
        self._journal.add("push", step, seconds=push.seconds)

    def _try_held_out(self, step: int) -> None:
        watch = Stopwatch()
        bodies = self._rules.make_held_out_tasks(step)
        self._submit(bodies)
        with self._gathered(bodies) as batch:
            watch.stop("sample")
            self._journal.add("held-out", step, **self._tell(bodies, batch), seconds=watch.seconds)

    def _submit(self, bodies: Sequence[Mapping[str, Any]]) -> None:
        """A task that is there already, with the same body, stays as it is."""
        for body in bodies:
            self._admin.post("/tasks", json=body).raise_for_status()

    @contextlib.contextmanager
    def _gathered(self, bodies: Sequence[Mapping[str, Any]]) -> Iterator[Batch]:
        """The tasks' groups as one batch, acknowledged at the end of the block or given back if it raises; those that never come are
        missing. Raises RuntimeError if no group came."""
        missing = {body["task_id"] for body in bodies}
        groups: dict[str, Group] = {}
        lost: dict[str, str] = {}
        with contextlib.ExitStack() as leases:
            while missing:
                part = self._client.lease(max_groups=len(missing), wait_seconds=5)
                if part is None:
                    lost |= {name: reason for name in missing if (reason := explain_absence(self._admin, name))}
                    missing -= lost.keys()
                    continue
                # Groups of a step that is done are delivered again if the trainer died before it acknowledged them.
                leases.enter_context(part)
                groups |= {group.group_id: group for group in part.groups if group.group_id in missing}
                missing -= groups.keys()
            if not groups:
                name, reason = next(iter(lost.items()))
                raise RuntimeError(f"none of {len(lost)} groups came; {name}: {reason}; see verbatim tasks show {name}")
            yield Batch([groups[body["task_id"]] for body in bodies if body["task_id"] in groups], self._read_version())

    def _read_version(self) -> int:
        return int(self._client.weights()["current"]["version"])

    def _tell(self, bodies: Sequence[Mapping[str, Any]], batch: Batch) -> dict[str, Any]:
        """What became of the rollouts and of their tokens. A rollout without a reward counts as 0."""
        rewards: dict[str, list[float]] = {kind: [] for kind in KINDS}
        failures: Counter[str] = Counter()
        told = 0
        for body in bodies:
            for rollout in self._admin.get(f"/tasks/{body['task_id']}/rollouts").raise_for_status().json()["rollouts"]:
                verdict = rollout["verdict"] or {}
                rewards[body["metadata"]["label"]].append(verdict.get("reward") or 0.0)
                told += verdict.get("metadata", {}).get("completion_tokens", 0)
                if verdict.get("failure"):
                    failures[verdict["failure"]["failure"]] += 1
        every = [reward for some in rewards.values() for reward in some]
        sessions = [session for group in batch.groups for session in group.sessions]
        return {
            "reward": sum(every) / len(every),
            "rewards": {kind: sum(some) / len(some) for kind, some in rewards.items() if some},
            "rollouts": len(every),
            "failures": dict(failures),
            "told_tokens": told,
            "sampled_tokens": sum(session.sampled_tokens for session in sessions),
            "exported_tokens": sum(session.exported_tokens for session in sessions),
            "quarantined_tokens": sum(item.tokens for session in sessions for item in session.quarantined),
            "row_tokens": sum(len(row.token_ids) for row in batch.rows),
            "tree_tokens": sum(len(tree.token_ids) for tree in batch.tree(2**20)),
            "versions": sorted({span.version for row in batch.rows for span in row.weight_versions}),
        }


class Stopwatch:
    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._last = time.monotonic()

    def stop(self, name: str) -> None:
        now = time.monotonic()
        self.seconds[name], self._last = round(now - self._last, 2), now


def train(
    url: Url,
    model_dir: ModelDir,
    weights_dir: WeightsDir,
    checkpoints: Annotated[Path, typer.Option(help="Where the optimizer of each version is kept.")],
    results: Annotated[Path, typer.Option(help="The journal: one JSON line per step, push and trial of held-out exercises.")],
    agent: Annotated[str, typer.Option(help=", ".join(AGENTS))],
    steps: Annotated[int, typer.Option()],
    groups: Annotated[int, typer.Option(help="Tasks per step.")],
    rollouts: Annotated[int, typer.Option(help="Rollouts per task.")],
    held_out: Annotated[int, typer.Option(help="Held-out exercises per trial.")],
    held_out_every: Annotated[int, typer.Option(help="Steps between their trials.")],
    learning_rate: Annotated[float, typer.Option()],
    seed: Annotated[int, typer.Option()] = 0,
    push: Annotated[bool, typer.Option(help="Publish the weights after every step.")] = True,
    shuffle: Annotated[
        bool,
        typer.Option(help="Give each rollout the reward of another of its group; if taught, each token the score of another."),
    ] = False,
    taught: Annotated[bool, typer.Option(help="Learn from a teacher's scores, whatever was earned.")] = False,
) -> None:
    """Train up to step `steps`. The tokens are read from VERBATIM_ADMIN_TOKEN, for the tasks, and VERBATIM_TRAINER_TOKEN."""
    rules = Rules(AGENTS[agent], steps, groups, rollouts, held_out, held_out_every, seed, push, shuffle, taught)
    journal = Journal(results)
    journal.mend()
    done = journal.done
    policy = Policy(Path(model_dir), Recipe(learning_rate, entropy_bonus=0.0))
    if done:
        policy.load(weights_dir / f"version-{done}", checkpoints / f"version-{done}" / OPTIMIZER)
    with connected(url) as (admin, client):
        Training(rules, policy, journal, weights_dir, checkpoints, admin, client).run()


if __name__ == "__main__":
    typer.run(train)
