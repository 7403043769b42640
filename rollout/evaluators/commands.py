"""A command that an evaluator runs over what the agent left behind."""

from __future__ import annotations

from dataclasses import dataclass
from posixpath import dirname, normpath

from rollout.evaluators.base import BadEvaluator, Case, EvaluationFailed, EvaluationTimedOut, Score
from rollout.evaluators.options import File, Options
from rollout.evaluators.rewards import shortened
from rollout.runtimes.base import Executed, Runtime
from rollout.task import Network, Task

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


def read_command(options: Options, default: tuple[str, ...] = ()) -> Command:
    """Of the options command, env, workdir, files, remove, timeout_seconds and timeout_reward. Raises `BadEvaluator`."""
    command = Command(
        argv=options.argv("command", default),
        env=options.text_table("env"),
        workdir=options.some_text("workdir"),
        files=options.files("files"),
        timeout_seconds=options.some_number("timeout_seconds", above=0),
        timeout_reward=options.some_number("timeout_reward"),
        remove=tuple(removable(options, "remove", path) for path in options.texts("remove")),
    )
    if command.timeout_reward is not None and command.timeout_seconds is None:
        raise options.refused("timeout_reward", "needs the option 'timeout_seconds'")
    return command


def removable(options: Options, name: str, path: str) -> str:
    """`path`, which is below the workdir or absolute. Raises `BadEvaluator`."""
    if "\0" in path or normpath(path) in ("/", "//", ".") or normpath(path).split("/")[0] == "..":
        raise options.refused(name, f"must name what is removed, not all there is, or what is above it: {path!r}")
    return path


def check_time(command: Command, task: Task) -> None:
    """Raises `BadEvaluator` where the evaluation would be stopped before the command's own time is up, and its reward never given."""
    seconds, budget = command.timeout_seconds, task.budgets.evaluation
    if command.timeout_reward is not None and seconds is not None and seconds >= budget:
        raise BadEvaluator(f"option 'timeout_seconds' is {seconds:g} and must be below the evaluation's budget of {budget:g}")


def runtime_of(case: Case) -> Runtime:
    if case.runtime is None:
        raise EvaluationFailed("this evaluator works in a runtime, and there is none")
    return case.runtime


async def ran(case: Case, command: Command) -> Executed:
    """What it did. Raises `EvaluationTimedOut` when its time was up, `EvaluationFailed`, and `RuntimeFailed`."""
    runtime = runtime_of(case)
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
        raise EvaluationTimedOut(f"{named(command)} was still at work after {seconds:g} seconds; {ending(done)}")
    return done


async def _clear(case: Case, command: Command) -> None:
    """Makes way for the files: an agent may have left a folder in the place of one, or a file in the place of its folder."""
    folders = [folder for file in command.files for folder in _above(file.path)]
    gone = [*command.remove, *(normpath(file.path) for file in command.files)]
    if not gone:
        return
    argv = ["sh", "-c", _CLEARED, "sh", *dict.fromkeys(folders), "--", *gone]
    done = await runtime_of(case).exec(argv, timeout_seconds=case.seconds, logs=case.logs)
    if done.exit_code != 0 or done.timed_out:
        raise EvaluationFailed(f"what the agent left at {', '.join(gone)} cannot be removed: {ending(done)}")


def _above(path: str) -> list[str]:
    """The folders in which `path` is, the outermost first."""
    folder = dirname(normpath(path))
    return [] if folder in ("", "/", "//") else [*_above(folder), folder]


def after_timeout(command: Command, error: EvaluationTimedOut) -> Score:
    """The declared reward of a command whose time was up. Raises `error` where none is declared."""
    if command.timeout_reward is None:
        raise error
    return Score(command.timeout_reward, feedback=shortened(str(error)), metadata={"timed_out": True})


def named(command: Command) -> str:
    """How messages name it."""
    return "the command " + shortened(
        repr(command.argv[-1] if command.argv[:2] == ("sh", "-c") else " ".join(command.argv)), 300
    )


def ending(done: Executed) -> str:
    """How it ended, with the end of what it wrote, for messages."""
    written = output(done)
    tail = f"…{written[-SHOWN_CHARS:]}" if len(written) > SHOWN_CHARS else written
    return f"exit code {done.exit_code}, " + (f"its output ended with:\n{tail}" if tail else "it wrote nothing")


def output(done: Executed) -> str:
    """Stdout, then stderr."""
    parts = [part.decode("utf-8", "replace").strip() for part in (done.stdout, done.stderr)]
    return "\n".join(part for part in parts if part)
