"""Kind `harbor`: the verifier of a Harbor task: `tests/test.sh` runs and leaves a reward file.

Options; `rollout.task_sources` makes them from a task's folder:

    tests            path below the tests folder -> content; `test.sh` is among them
    env, workdir, timeout_seconds, timeout_reward   as of kind `command`
    network          proxy or full; default: the runtime's own
    reward_key       which number of a reward.json is the reward; default: `reward`, or the only one that there is
    tests_folder     default /tests; what the agent left there is removed before
    verifier_folder  where the reward files are written; default /logs/verifier

As Harbor does it (`harbor.verifier.verifier`, 0.25): old reward files are removed first, the exit code of test.sh does not matter,
reward.json goes before reward.txt, and a missing, empty or non-finite reward is a failure.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from posixpath import join
from typing import cast

from rollout.evaluators.base import (
    BadReward,
    Case,
    EvaluationFailed,
    EvaluationTimedOut,
    File,
    Options,
    Score,
    of_case,
    parse_reward,
    parse_reward_text,
    shorten,
)
from rollout.evaluators.command import (
    Command,
    check_removable,
    check_time,
    describe_end,
    read_output,
    require_runtime,
    run_command,
    score_timeout,
)
from rollout.evaluators.diff import collect
from rollout.runtimes.base import Executed
from rollout.task import EvaluatorSpec, Network, Task

SCRIPT = "test.sh"
NETWORKS = ("proxy", "full")


@dataclass(frozen=True, slots=True)
class Wanted:
    command: Command
    reward_key: str | None
    verifier_folder: str


class HarborEvaluator:
    name = "harbor"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        check_time(_read(Options(self.name, spec.options)).command, task)

    async def evaluate(self, case: Case) -> Score:
        wanted = of_case(self.name, case, _read)
        await _clear(case, wanted)
        try:
            done = await run_command(case, wanted.command)
        except EvaluationTimedOut as error:
            return score_timeout(wanted.command, error)
        paths = [join(wanted.verifier_folder, name) for name in ("reward.json", "reward.txt")]
        collected = await collect(require_runtime(case), paths)
        rewards = _rewards(collected.at(paths[0]), collected.at(paths[1]), wanted, done)
        reward = _chosen(rewards, wanted)
        return Score(reward, feedback=shorten(read_output(done)), metadata={"rewards": rewards, "exit_code": done.exit_code})


def _read(options: Options) -> Wanted:
    folder = options.text("tests_folder", "/tests")
    tests = options.files("tests")
    if SCRIPT not in [file.path for file in tests]:
        raise options.refused("tests", f"lacks {SCRIPT}")
    network = options.choice("network", NETWORKS) if options.has("network") else None
    wanted = Wanted(
        command=Command(
            # By way of a shell, as Harbor does it: it also runs a script that names no interpreter.
            argv=("sh", "-c", '"$0"', join(folder, SCRIPT)),
            env=options.text_table("env"),
            workdir=options.some_text("workdir"),
            files=tuple(_placed(options, file, folder) for file in tests),
            timeout_seconds=options.some_number("timeout_seconds", above=0),
            timeout_reward=options.some_number("timeout_reward"),
            network=cast(Network | None, network),
            remove=(check_removable(options, "tests_folder", folder),),
        ),
        reward_key=options.some_text("reward_key"),
        verifier_folder=options.text("verifier_folder", "/logs/verifier"),
    )
    options.done()
    return wanted


def _placed(options: Options, file: File, folder: str) -> File:
    if file.path.startswith("/") or ".." in file.path.split("/"):
        raise options.refused("tests", f"must hold paths below the tests folder, not {file.path!r}")
    return File(join(folder, file.path), file.content, 0o755 if file.path.endswith(".sh") else file.mode)


async def _clear(case: Case, wanted: Wanted) -> None:
    line = 'mkdir -p -- "$0" && rm -f -- "$0/reward.txt" "$0/reward.json"'
    argv = ["sh", "-c", line, wanted.verifier_folder]
    done = await require_runtime(case).exec(argv, timeout_seconds=case.seconds, logs=case.logs)
    if done.exit_code != 0:
        raise EvaluationFailed(f"{wanted.verifier_folder} cannot be made ready: {describe_end(done)}")


def _rewards(as_json: bytes | None, as_text: bytes | None, wanted: Wanted, done: Executed) -> dict[str, float]:
    """Every number of the reward file, by name."""
    if as_json is None and as_text is None:
        raise BadReward(f"{SCRIPT} left no reward.json or reward.txt in {wanted.verifier_folder}: {describe_end(done)}")
    if as_json is None:
        return {"reward": parse_reward_text((as_text or b"").decode("utf-8", "replace"), "reward.txt")}
    try:
        value = json.loads(as_json)
    except (ValueError, RecursionError) as error:
        raise BadReward(f"reward.json is no JSON: {error}; {describe_end(done)}") from error
    if not isinstance(value, Mapping):
        value = {"reward": value}
    # Harbor takes true and false for 1 and 0.
    return {
        name: parse_reward(int(each) if isinstance(each, bool) else each, f"{name!r} of reward.json")
        for name, each in value.items()
    }


def _chosen(rewards: Mapping[str, float], wanted: Wanted) -> float:
    key = wanted.reward_key or ("reward" if "reward" in rewards or len(rewards) != 1 else next(iter(rewards)))
    if key not in rewards:
        named = ", ".join(rewards) or "nothing"
        raise BadReward(f"reward.json has no {key!r}, but {named}: name the reward by the option 'reward_key'")
    return rewards[key]
