"""Kind `command`: a command's exit code, or what it prints, is the reward.

Exit codes 126 and 127 mean that the command could not be run: no reward, unless `exit_rewards` names them. Also here: running a command
over what the agent left (`GradingCommand`, `run_command`), which other kinds use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from posixpath import dirname, normpath
from typing import Annotated, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from contract.tasks import EvaluatorSpec, Network, Task
from rollout.evaluators.base import (
    Argv,
    BadEvaluator,
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
    Texts,
    TextTable,
    parse_reward_text,
    parse_score,
    read_text,
    shorten,
)
from rollout.runtimes.base import Executed, Runtime

NOT_RUN = (126, 127)
SEARCHED_CHARS, LINE_CHARS = 65_536, 4096
"""The end of stdout, and of each line, that a pattern is matched against. The agent may influence what is printed, and some patterns
take time that grows with its square."""


def check_removable(path: str) -> str:
    """`path`, which is absolute or below the workdir. Raises ValueError."""
    if "\0" in path or normpath(path) in ("/", "//", ".") or normpath(path).split("/")[0] == "..":
        raise ValueError(f"must name files to remove, not the whole folder or one above it: {path!r}")
    return path


def _check_all_removable(paths: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(map(check_removable, paths))


def _check_exit_codes(given: object) -> object:
    for code in given if isinstance(given, dict) else ():
        if not re.fullmatch(r"\d{1,3}", str(code)):
            raise ValueError(f"must map exit codes to rewards, and {code!r} is no exit code")
    return given


def _compile(value: object) -> re.Pattern[str]:
    try:
        pattern = re.compile(read_text(value))
    except re.error as error:
        raise ValueError(f"is no regular expression: {error}") from error
    if pattern.groups > 1:
        raise ValueError(f"has {pattern.groups} groups: the number is the only group, or the whole match")
    return pattern


class RunOptions(Options):
    """The options of every kind that runs a command of the user's."""

    command: Argv
    env: TextTable = Field(default_factory=dict)
    workdir: Text | None = None
    """None: the runtime's."""
    files: Files = ()
    remove: Annotated[Texts, AfterValidator(_check_all_removable)] = ()
    timeout_seconds: Seconds | None = None
    timeout_reward: Number | None = None

    @model_validator(mode="after")
    def _check_timeout(self) -> Self:
        if self.timeout_reward is not None and self.timeout_seconds is None:
            raise ValueError("option 'timeout_reward' needs the option 'timeout_seconds'")
        return self

    def build(self) -> GradingCommand:
        return GradingCommand(
            self.command, self.env, self.workdir, self.files, self.timeout_seconds, self.timeout_reward, remove=self.remove
        )


class CommandOptions(RunOptions):
    kind = "command"

    reward: Literal["exit_code", "number", "json"] = "exit_code"
    """exit_code: 0 gives 1.0, any other code 0.0. number: the number that it prints. json: the object that it prints, `{reward,
    per_call?, per_branch?, feedback?, metadata?}`."""
    exit_rewards: Annotated[dict[str, Number], BeforeValidator(_check_exit_codes)] = Field(default_factory=dict)
    """With exit_code: code -> reward, for exactly these codes; any other is a failure."""
    pattern: Annotated[re.Pattern[str], BeforeValidator(_compile)] | None = None
    """With number: a regular expression whose only group, or whole match, is the number. It is matched line by line at the end of stdout,
    and the last match counts. Without it: the last line that is not blank."""
    any_exit: bool = False
    """With number and json: whether to accept what it printed if its exit code is not 0."""

    @model_validator(mode="after")
    def _check_reward(self) -> Self:
        for option, rewards in (("exit_rewards", ("exit_code",)), ("pattern", ("number",)), ("any_exit", ("number", "json"))):
            if option in self.model_fields_set and self.reward not in rewards:
                raise ValueError(f"option {option!r} belongs to reward {' or '.join(rewards)}, not to {self.reward}")
        return self


class CommandEvaluator:
    name = "command"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        check_time(CommandOptions.read(spec.options).build(), task)

    async def evaluate(self, case: Case) -> Score:
        options = CommandOptions.read_case(case)
        command = options.build()
        try:
            done = await run_command(case, command)
        except EvaluationTimedOut as error:
            return score_timeout(command, error)
        if options.reward == "exit_code":
            return _score_exit_code(options, command, done)
        if done.exit_code != 0 and not options.any_exit:
            raise EvaluationFailed(f"{describe(command)} gives no reward: {describe_end(done)}")
        return _score_number(options, command, done) if options.reward == "number" else _score_json(command, done)


def _score_exit_code(options: CommandOptions, command: GradingCommand, done: Executed) -> Score:
    code, feedback = done.exit_code, shorten(read_output(done))
    if options.exit_rewards:
        rewards = {int(each): reward for each, reward in options.exit_rewards.items()}
        if code not in rewards:
            raise EvaluationFailed(f"{describe(command)}: 'exit_rewards' has no reward for {describe_end(done)}")
        return Score(rewards[code], feedback=feedback, metadata={"exit_code": code})
    if code in NOT_RUN:
        raise EvaluationFailed(f"{describe(command)} could not be run: {describe_end(done)}")
    return Score(1.0 if code == 0 else 0.0, feedback=feedback, metadata={"exit_code": code})


def _score_number(options: CommandOptions, command: GradingCommand, done: Executed) -> Score:
    printed, pattern = done.stdout.decode("utf-8", "replace"), options.pattern
    if pattern is None:
        found = [line for line in printed.splitlines() if line.strip()]
    else:
        lines = printed[-SEARCHED_CHARS:].splitlines()
        found = [match[pattern.groups] or "" for line in lines for match in pattern.finditer(line[-LINE_CHARS:])]
    if not found:
        sought = "a line" if pattern is None else f"a match of {pattern.pattern!r}"
        raise BadReward(f"{describe(command)} printed no reward ({sought} on stdout was looked for): {describe_end(done)}")
    reward = parse_reward_text(found[-1], f"what {describe(command)} printed")
    return Score(reward, feedback=shorten(read_output(done)), metadata={"exit_code": done.exit_code})


def _score_json(command: GradingCommand, done: Executed) -> Score:
    """The object is all of stdout, or its last line that is not blank: a command may print other things first."""
    printed = done.stdout.decode("utf-8", "replace").strip()
    for text in (printed, printed.rpartition("\n")[2]):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return parse_score(value, f"what {describe(command)} printed")
    raise BadReward(f"{describe(command)} printed no JSON object on stdout: {describe_end(done)}")


# Running a command over what the agent left.


SHOWN_CHARS = 4000
"""Of a command's output in a message."""
_CLEAR = """
chmod u+rwx . 2> /dev/null
while [ "$1" != -- ]; do
    [ -d "$1" ] || rm -f -- "$1"
    [ ! -d "$1" ] || chmod u+rwx -- "$1" 2> /dev/null
    shift
done
shift
for path in "$@"; do
    [ -L "$path" ] || chmod -R u+rwX -- "$path" 2> /dev/null
done
rm -rf -- "$@" && exit
for path in "$@"; do
    # A place of the runtime's own stays, but empty.
    [ -d "$path" ] && [ ! -L "$path" ] && [ -z "$(ls -A -- "$path")" ] && continue
    [ ! -e "$path" ] && [ ! -L "$path" ] || exit 1
done
"""
"""sh -c _CLEAR sh <folders that must not be files>... -- <paths to remove>... Nothing can be removed from a folder that its owner may not
write, or made there."""


@dataclass(frozen=True, slots=True)
class GradingCommand:
    """`remove` is removed and `files` are written just before it runs, over whatever the agent left there: what grades the agent must not
    be the agent's."""

    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str | None
    files: tuple[File, ...]
    timeout_seconds: float | None
    """None: as long as the evaluation may take."""
    timeout_reward: float | None
    """The reward of a command that runs out of time; None: no reward."""
    network: Network | None = None
    """None: the runtime's."""
    remove: tuple[str, ...] = ()


def check_time(command: GradingCommand, task: Task) -> None:
    """Raises `BadEvaluator` if the evaluation would be cancelled before the command times out, so its reward could never be given."""
    seconds, budget = command.timeout_seconds, task.budgets.evaluation
    if command.timeout_reward is not None and seconds is not None and seconds >= budget:
        raise BadEvaluator(f"option 'timeout_seconds' is {seconds:g} and must be below the evaluation's budget of {budget:g}")


def require_runtime(case: Case) -> Runtime:
    if case.runtime is None:
        raise EvaluationFailed("this evaluator works in a runtime, and there is none")
    return case.runtime


async def run_command(case: Case, command: GradingCommand) -> Executed:
    """Raises `EvaluationTimedOut` when its time is up, `EvaluationFailed`, and `RuntimeFailed`."""
    runtime = require_runtime(case)
    await clear(case, command.remove, [file.path for file in command.files])
    for file in command.files:
        await runtime.upload(file.path, file.content, mode=file.mode)
    seconds = min(command.timeout_seconds or case.seconds, case.seconds)
    done = await runtime.exec(
        command.argv,
        env=command.env,
        workdir=command.workdir,
        timeout_seconds=seconds,
        logs=case.logs,
        network=command.network,
    )
    if done.timed_out:
        raise EvaluationTimedOut(f"{describe(command)} was still at work after {seconds:g} seconds; {describe_end(done)}")
    return done


async def clear(case: Case, paths: Sequence[str], files: Sequence[str]) -> None:
    """Remove `paths`, and make way for `files`: the agent may have left a folder in place of one, or a file in place of its folder. Raises
    `EvaluationFailed`."""
    folders = [folder for path in files for folder in _list_parents(path)]
    gone = [*paths, *map(normpath, files)]
    if not gone:
        return
    argv = ["sh", "-c", _CLEAR, "sh", *dict.fromkeys(folders), "--", *gone]
    done = await require_runtime(case).exec(argv, timeout_seconds=case.seconds, logs=case.logs)
    if done.exit_code != 0 or done.timed_out:
        raise EvaluationFailed(f"what the agent left at {', '.join(gone)} cannot be removed: {describe_end(done)}")


def _list_parents(path: str) -> list[str]:
    """The folders above `path`, outermost first."""
    folder = dirname(normpath(path))
    return [] if folder in ("", "/", "//") else [*_list_parents(folder), folder]


def score_timeout(command: GradingCommand, error: EvaluationTimedOut) -> Score:
    """The declared reward of a command that ran out of time. Raises `error` if none is declared."""
    if command.timeout_reward is None:
        raise error
    return Score(command.timeout_reward, feedback=shorten(str(error)), metadata={"timed_out": True})


def describe(command: GradingCommand) -> str:
    """The command's name in messages."""
    line = command.argv[-1] if command.argv[:2] == ("sh", "-c") else " ".join(command.argv)
    return "the command " + shorten(repr(line), 300)


def describe_end(done: Executed) -> str:
    """The exit code and the end of the output, for messages."""
    written = read_output(done)
    tail = f"…{written[-SHOWN_CHARS:]}" if len(written) > SHOWN_CHARS else written
    return f"exit code {done.exit_code}, " + (f"its output ended with:\n{tail}" if tail else "it wrote nothing")


def read_output(done: Executed) -> str:
    """Stdout, then stderr."""
    parts = [part.decode("utf-8", "replace").strip() for part in (done.stdout, done.stderr)]
    return "\n".join(part for part in parts if part)
