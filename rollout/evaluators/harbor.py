"""Kind `harbor`: the verifier of a Harbor task, `tests/test.sh`, leaves a reward file.

As in Harbor 0.25 (`harbor.verifier.verifier`), old reward files are removed first, the exit code of test.sh is ignored, reward.json wins
over reward.txt, and a missing, empty or non-finite reward is a failure. `rollout.task_sources` makes the options from a task's folder.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from posixpath import join
from typing import Annotated

from pydantic import AfterValidator, Field

from contract.tasks import EvaluatorSpec, Network, Task
from rollout.evaluators.base import (
    BadReward,
    Case,
    EvaluationFailed,
    EvaluationTimedOut,
    File,
    Files,
    Number,
    Options,
    Score,
    Seconds,
    Text,
    TextTable,
    parse_reward,
    parse_reward_text,
    shorten,
)
from rollout.evaluators.collected import collect
from rollout.evaluators.command import (
    GradingCommand,
    check_removable,
    check_time,
    clear,
    describe_end,
    read_output,
    require_runtime,
    run_command,
    score_timeout,
)
from rollout.runtimes.base import Executed

SCRIPT = "test.sh"


def _check_tests(files: tuple[File, ...]) -> tuple[File, ...]:
    if SCRIPT not in [file.path for file in files]:
        raise ValueError(f"lacks {SCRIPT}")
    for file in files:
        if file.path.startswith("/") or ".." in file.path.split("/"):
            raise ValueError(f"must hold paths below the tests folder, not {file.path!r}")
    return files


class HarborOptions(Options):
    kind = "harbor"

    tests: Annotated[Files, AfterValidator(_check_tests)] = Field(default=(), validate_default=True)
    """Content by path below the tests folder, `test.sh` among them."""
    env: TextTable = Field(default_factory=dict)
    workdir: Text | None = None
    timeout_seconds: Seconds | None = None
    timeout_reward: Number | None = None
    network: Network | None = None
    """None: the runtime's."""
    reward_key: Text | None = None
    """Which number of a reward.json is the reward; None: `reward`, or the only one."""
    tests_folder: Annotated[Text, AfterValidator(check_removable)] = "/tests"
    """What the agent left there is removed first."""
    verifier_folder: Text = "/logs/verifier"
    """Where the reward files are written."""

    def build(self) -> GradingCommand:
        folder = self.tests_folder
        files = [
            File(join(folder, file.path), file.content, 0o755 if file.path.endswith(".sh") else file.mode)
            for file in self.tests
        ]
        return GradingCommand(
            # Through a shell, as in Harbor: it also runs a script without a shebang.
            argv=("sh", "-c", '"$0"', join(folder, SCRIPT)),
            env=self.env,
            workdir=self.workdir,
            files=tuple(files),
            timeout_seconds=self.timeout_seconds,
            timeout_reward=self.timeout_reward,
            network=self.network,
            remove=(folder,),
        )


class HarborEvaluator:
    name = "harbor"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        check_time(HarborOptions.read(spec.options).build(), task)

    async def evaluate(self, case: Case) -> Score:
        options = HarborOptions.read_case(case)
        command = options.build()
        paths = [join(options.verifier_folder, name) for name in ("reward.json", "reward.txt")]
        await clear(case, (), paths)
        await _make_folder(case, options.verifier_folder)
        try:
            done = await run_command(case, command)
        except EvaluationTimedOut as error:
            return score_timeout(command, error)
        collected = await collect(require_runtime(case), paths)
        rewards = _read_rewards(collected.at(paths[0]), collected.at(paths[1]), options.verifier_folder, done)
        reward = _choose(rewards, options.reward_key)
        return Score(reward, feedback=shorten(read_output(done)), metadata={"rewards": rewards, "exit_code": done.exit_code})


async def _make_folder(case: Case, folder: str) -> None:
    argv = ["mkdir", "-p", "--", folder]
    done = await require_runtime(case).exec(argv, timeout_seconds=case.seconds, logs=case.logs)
    if done.exit_code != 0:
        raise EvaluationFailed(f"{folder} cannot be made ready: {describe_end(done)}")


def _read_rewards(as_json: bytes | None, as_text: bytes | None, verifier_folder: str, done: Executed) -> dict[str, float]:
    """Every number of the reward file, by name."""
    if as_json is None and as_text is None:
        raise BadReward(f"{SCRIPT} left no reward.json or reward.txt in {verifier_folder}: {describe_end(done)}")
    if as_json is None:
        return {"reward": parse_reward_text((as_text or b"").decode("utf-8", "replace"), "reward.txt")}
    try:
        value = json.loads(as_json)
    except (ValueError, RecursionError) as error:
        raise BadReward(f"reward.json is no JSON: {error}; {describe_end(done)}") from error
    if not isinstance(value, Mapping):
        value = {"reward": value}
    # Harbor counts true and false as 1 and 0.
    return {
        name: parse_reward(int(each) if isinstance(each, bool) else each, f"{name!r} of reward.json")
        for name, each in value.items()
    }


def _choose(rewards: Mapping[str, float], reward_key: str | None) -> float:
    key = reward_key or ("reward" if "reward" in rewards or len(rewards) != 1 else next(iter(rewards)))
    if key not in rewards:
        names = ", ".join(rewards) or "nothing"
        raise BadReward(f"reward.json has no {key!r}, but {names}: name the reward by the option 'reward_key'")
    return rewards[key]
