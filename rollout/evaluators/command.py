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

from rollout.evaluators.base import BadReward, Case, EvaluationFailed, EvaluationTimedOut, Score
from rollout.evaluators.commands import Command, after_timeout, check_time, ending, named, output, ran, read_command
from rollout.evaluators.options import Options, of_case
from rollout.evaluators.rewards import as_score, read_reward, shortened
from rollout.runtimes.base import Executed
from rollout.task import EvaluatorSpec, Task

REWARDS = ("exit_code", "number", "json")
NOT_RUN = (126, 127)
SEARCHED_CHARS, LINE_CHARS = 65_536, 4096
"""Of stdout, and of a line, that a pattern is looked for in. An agent has a hand in what is printed, and the time that some patterns
take grows with its square."""


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
            done = await ran(case, wanted.command)
        except EvaluationTimedOut as error:
            return after_timeout(wanted.command, error)
        if wanted.reward == "exit_code":
            return _of_exit_code(wanted, done)
        if done.exit_code != 0 and not wanted.any_exit:
            raise EvaluationFailed(f"{named(wanted.command)} gives no reward: {ending(done)}")
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
    code, feedback = done.exit_code, shortened(output(done))
    if wanted.exit_rewards:
        if code not in wanted.exit_rewards:
            raise EvaluationFailed(f"{named(wanted.command)}: 'exit_rewards' has no reward for {ending(done)}")
        return Score(wanted.exit_rewards[code], feedback=feedback, metadata={"exit_code": code})
    if code in NOT_RUN:
        raise EvaluationFailed(f"{named(wanted.command)} could not be run: {ending(done)}")
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
        raise BadReward(f"{named(wanted.command)} printed no reward ({looked_for} on stdout was looked for): {ending(done)}")
    reward = read_reward(found[-1], f"what {named(wanted.command)} printed")
    return Score(reward, feedback=shortened(output(done)), metadata={"exit_code": done.exit_code})


def _of_json(wanted: Wanted, done: Executed) -> Score:
    """The object is the whole of stdout, or else its last line that is not blank: a command may print before it."""
    printed = done.stdout.decode("utf-8", "replace").strip()
    for text in (printed, printed.rpartition("\n")[2]):
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            continue
        return as_score(value, f"what {named(wanted.command)} printed")
    raise BadReward(f"{named(wanted.command)} printed no JSON object on stdout: {ending(done)}")
