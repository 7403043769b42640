"""Kind `command`: a command looks at the result, and its exit code or what it prints is the reward.

Options, beside those of `commands.read_command`:

    reward        exit_code (default): 0 gives 1.0, every other code 0.0. number: the number that it prints. json: the object that
                  it prints, {reward, per_call?, per_branch?, feedback?, metadata?}
    exit_rewards  with exit_code: code -> reward, for exactly these codes; another one is a failure
    pattern       with number: a regular expression whose only group, or the whole of it, is the number. It is looked for line by
                  line at the end of stdout, and its last match counts. Without: the last line that is not blank
    any_exit      with number and json: true takes what it printed also when its exit code is not 0

Exit codes 126 and 127 say that the command could not be run, and are a failure unless `exit_rewards` names them.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from posixpath import dirname, normpath

from rollout.evaluators.base import (
    BadEvaluator,
    BadReward,
    Case,
    EvaluationFailed,
    EvaluationTimedOut,
    File,
    Options,
    Score,
    of_case,
    parse_reward_text,
    parse_score,
    shorten,
)
from rollout.runtimes.base import Executed, Runtime
from rollout.task import EvaluatorSpec, Network, Task

REWARDS = ("exit_code", "number", "json")
NOT_RUN = (126, 127)
SEARCHED_CHARS, LINE_CHARS = 65_536, 4096
"""Of stdout, and of a line, that a pattern is looked for in. An agent has a hand in what is printed, and the time that some patterns
take grows with its square."""


@dataclass(frozen=True, slots=True)
class Command:
    """`files` are written just before it runs, over whatever the agent left at their paths: what grades must not be the agent's. What
    is at `remove` is removed before."""

    argv: tuple[str, ...]
    env: dict[str, str]
    workdir: str | None
    files: tuple[File, ...]
    timeout_seconds: float | None
    """None: as long as the evaluation may take."""
    timeout_reward: float | None
    """None: a command whose time is up gives no reward."""
    network: Network | None = None
    """None: the runtime's own."""
    remove: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    command: Command
    reward: str
    exit_rewards: dict[int, float]
    pattern: re.Pattern[str] | None
    any_exit: bool


class CommandEvaluator:
    name = "command"
    needs_runtime = True

    def check(self, spec: EvaluatorSpec, task: Task) -> None:
        check_time(_read(Options(self.name, spec.options)).command, task)

    async def evaluate(self, case: Case) -> Score:
        wanted = of_case(self.name, case, _read)
        try:
            done = await run_command(case, wanted.command)
        except EvaluationTimedOut as error:
            return score_timeout(wanted.command, error)
        if wanted.reward == "exit_code":
            return _of_exit_code(wanted, done)
        if done.exit_code != 0 and not wanted.any_exit:
            raise EvaluationFailed(f"{describe(wanted.command)} gives no reward: {describe_end(done)}")
        return _of_number(wanted, done) if wanted.reward == "number" else _of_json(wanted, done)


def _read(options: Options) -> Wanted:
    wanted = Wanted(
        command=read_command(options),
        reward=options.choice("reward", REWARDS),
        exit_rewards=_exit_rewards(options),
        pattern=_pattern(options),
        any_exit=options.flag("any_exit"),
    )
    options.done()
    for option, reward in (("exit_rewards", ("exit_code",)), ("pattern", ("number",)), ("any_exit", ("number", "json"))):
        if options.has(option) and wanted.reward not in reward:
            raise options.refused(option, f"belongs to reward {' or '.join(reward)}, not to {wanted.reward}")
    return wanted


def _exit_rewards(options: Options) -> dict[int, float]:
    table = options.table("exit_rewards")
    rewards = Options(options.kind, table)
    for code in table:
        if not re.fullmatch(r"\d{1,3}", code):
            raise options.refused("exit_rewards", f"must map exit codes to rewards, and {code!r} is no exit code")
    return {int(code): rewards.number(code) for code in table}


def _pattern(options: Options) -> re.Pattern[str] | None:
    text = options.some_text("pattern")
    try:
        pattern = re.compile(text) if text else None
    except re.error as error:
        raise options.refused("pattern", f"is no regular expression: {error}") from error
    if pattern is not None and pattern.groups > 1:
        raise options.refused("pattern", f"has {pattern.groups} groups: the number is the only group, or the whole match")
    return pattern


def _of_exit_code(wanted: Wanted, done: Executed) -> Score:
    code, feedback = done.exit_code, shorten(read_output(done))
    if wanted.exit_rewards:
        if code not in wanted.exit_rewards:
            raise EvaluationFailed(f"{describe(wanted.command)}: 'exit_rewards' has no reward for {describe_end(done)}")
        return Score(wanted.exit_rewards[code], feedback=feedback, metadata={"exit_code": code})
    if code in NOT_RUN:
        raise EvaluationFailed(f"{describe(wanted.command)} could not be run: {describe_end(done)}")
    return Score(1.0 if code == 0 else 0.0, feedback=feedback, metadata={"exit_code": code})


def _of_number(wanted: Wanted, done: Executed) -> Score:
    printed = done.stdout.decode("utf-8", "replace")
    if wanted.pattern is None:
        found = [line for line in printed.splitlines() if line.strip()]
    else:
        lines = printed[-SEARCHED_CHARS:].splitlines()
        found = [match[wanted.pattern.groups] or "" for line in lines for match in wanted.pattern.finditer(line[-LINE_CHARS:])]
    if not found:
        looked_for = "a line" if wanted.pattern is None else f"a match of {wanted.pattern.pattern!r}"
        raise BadReward(
            f"{describe(wanted.command)} printed no reward ({looked_for} on stdout was looked for): {describe_end(done)}"
        )
    reward = parse_reward_text(found[-1], f"what {describe(wanted.command)} printed")
    return Score(reward, feedback=shorten(read_output(done)), metadata={"exit_code": done.exit_code})


def _of_json(wanted: Wanted, done: Executed) -> Score:
    """The object is the whole of stdout, or else its last line that is not blank: a command may print before it."""
    printed = done.stdout.decode("utf-8", "replace").strip()
    for text in (printed, printed.rpartition("\n")[2]):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return parse_score(value, f"what {describe(wanted.command)} printed")
    raise BadReward(f"{describe(wanted.command)} printed no JSON object on stdout: {describe_end(done)}")


# A command that an evaluator runs over what the agent left behind.


SHOWN_CHARS = 4000
"""Of a command's output in a message."""
_CLEARED = """
while [ "$1" != -- ]; do
    [ -d "$1" ] || rm -f -- "$1"
    shift
done
exec rm -rf "$@"
"""
"""sh -c _CLEARED sh <folders that are to be there or not>... -- <what is not to be there>..."""


def read_command(options: Options, default: tuple[str, ...] = ()) -> Command:
    """Of the options command, env, workdir, files, remove, timeout_seconds and timeout_reward. Raises `BadEvaluator`."""
    command = Command(
        argv=options.argv("command", default),
        env=options.text_table("env"),
        workdir=options.some_text("workdir"),
        files=options.files("files"),
        timeout_seconds=options.some_number("timeout_seconds", above=0),
        timeout_reward=options.some_number("timeout_reward"),
        remove=tuple(check_removable(options, "remove", path) for path in options.texts("remove")),
    )
    if command.timeout_reward is not None and command.timeout_seconds is None:
        raise options.refused("timeout_reward", "needs the option 'timeout_seconds'")
    return command


def check_removable(options: Options, name: str, path: str) -> str:
    """`path`, which is below the workdir or absolute. Raises `BadEvaluator`."""
    if "\0" in path or normpath(path) in ("/", "//", ".") or normpath(path).split("/")[0] == "..":
        raise options.refused(name, f"must name what is removed, not all there is, or what is above it: {path!r}")
    return path


def check_time(command: Command, task: Task) -> None:
    """Raises `BadEvaluator` where the evaluation would be stopped before the command's own time is up, and its reward never given."""
    seconds, budget = command.timeout_seconds, task.budgets.evaluation
    if command.timeout_reward is not None and seconds is not None and seconds >= budget:
        raise BadEvaluator(f"option 'timeout_seconds' is {seconds:g} and must be below the evaluation's budget of {budget:g}")


def require_runtime(case: Case) -> Runtime:
    if case.runtime is None:
        raise EvaluationFailed("this evaluator works in a runtime, and there is none")
    return case.runtime


async def run_command(case: Case, command: Command) -> Executed:
    """What it did. Raises `EvaluationTimedOut` when its time was up, `EvaluationFailed`, and `RuntimeFailed`."""
    runtime = require_runtime(case)
    await _clear(case, command)
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


async def _clear(case: Case, command: Command) -> None:
    """Makes way for the files: an agent may have left a folder in the place of one, or a file in the place of its folder."""
    folders = [folder for file in command.files for folder in _above(file.path)]
    gone = [*command.remove, *(normpath(file.path) for file in command.files)]
    if not gone:
        return
    argv = ["sh", "-c", _CLEARED, "sh", *dict.fromkeys(folders), "--", *gone]
    done = await require_runtime(case).exec(argv, timeout_seconds=case.seconds, logs=case.logs)
    if done.exit_code != 0 or done.timed_out:
        raise EvaluationFailed(f"what the agent left at {', '.join(gone)} cannot be removed: {describe_end(done)}")


def _above(path: str) -> list[str]:
    """The folders in which `path` is, the outermost first."""
    folder = dirname(normpath(path))
    return [] if folder in ("", "/", "//") else [*_above(folder), folder]


def score_timeout(command: Command, error: EvaluationTimedOut) -> Score:
    """The declared reward of a command whose time was up. Raises `error` where none is declared."""
    if command.timeout_reward is None:
        raise error
    return Score(command.timeout_reward, feedback=shorten(str(error)), metadata={"timed_out": True})


def describe(command: Command) -> str:
    """How messages name it."""
    return "the command " + shorten(repr(command.argv[-1] if command.argv[:2] == ("sh", "-c") else " ".join(command.argv)), 300)


def describe_end(done: Executed) -> str:
    """How it ended, with the end of what it wrote, for messages."""
    written = read_output(done)
    tail = f"…{written[-SHOWN_CHARS:]}" if len(written) > SHOWN_CHARS else written
    return f"exit code {done.exit_code}, " + (f"its output ended with:\n{tail}" if tail else "it wrote nothing")


def read_output(done: Executed) -> str:
    """Stdout, then stderr."""
    parts = [part.decode("utf-8", "replace").strip() for part in (done.stdout, done.stderr)]
    return "\n".join(part for part in parts if part)
