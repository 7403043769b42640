"""What every agent does when a call fails, or breaks off in the middle."""

from __future__ import annotations

import threading
from dataclasses import replace

from tests.harnesses.agent_run import RARE, Cli
from tests.harnesses.player import Act, Step
from tests.harnesses.stage import Stage
from tests.harnesses.truths import check_done, check_truths, unrecorded
from tests.support.engine.scripted_engine import Drop, Fail


def acts_with(cli: Cli, stage: Stage, name: str, changed: Act) -> list[Act]:
    """The plain run, with `changed` in front of the step that edits the file."""
    steps: list[Step] = list(cli.steps(stage.workdir(cli, name)))
    return [*steps[: cli.change_at], changed, *steps[cli.change_at :]]


def test_calls_that_fail_are_made_again_and_go_on_from_the_same_turn(cli: Cli, failing_stage: Stage) -> None:
    """One run with two failures: the engine hangs up on one call and answers another with 500."""
    steps = list(cli.steps(failing_stage.workdir(cli, "failed")))
    at = cli.change_at
    acts: list[Act] = [*steps[: at - 1], Drop(), steps[at - 1], Fail(500), *steps[at:]]
    played = failing_stage.play(cli, acts, "failed")
    check_done(played)
    check_truths(played)
    # The engine heard both, and sampled nothing that could be recorded.
    assert len(unrecorded(played)) == 2
    assert played.branches == cli.branches
    assert len(played.main_rows) == 1 + len(cli.branches)


def test_a_reply_whose_engine_breaks_off_in_the_middle_is_kept_as_far_as_it_came(cli: Cli, stage: Stage) -> None:
    """Whatever the agent makes of it: a streamed reply ends in an error event, a whole one is an error."""
    steps = cli.steps(stage.workdir(cli, "broken"))
    broken = replace(steps[cli.change_at], how={"break_after": 12, "seconds_per_token": 0.02}, once=True)
    played = stage.play(cli, acts_with(cli, stage, "broken", broken), "broken")
    check_truths(played)
    cut = [call for call in played.calls if call["status"] == "failed"]
    assert [len(call["completion_ids"]) for call in cut] == ([12] if cli.streams else [])
    assert not any(call["delivered"] for call in cut)
    if cli.survives_broken_reply:
        check_done(played)


def test_a_connection_that_breaks_within_a_reply_loses_nothing(cli: Cli, stage: Stage) -> None:
    """The agent's own connection, while the engine goes on: the call is ended, and recorded with what was sampled. A streamed reply
    does not end by itself."""
    change = cli.steps(stage.workdir(cli, "hung-up"))[cli.change_at]
    but_the_last = len(stage.family.encode(change.say(stage.family).text)) - 1
    held = {"gate": threading.Event(), "gate_after": but_the_last} if cli.streams else {}
    broken = replace(change, how={"seconds_per_token": 0.03, **held}, once=True)
    played = stage.play(cli, acts_with(cli, stage, "hung-up", broken), "hung-up", break_at=RARE.encode())
    assert played.broke
    check_truths(played)
    if cli.streams:
        (cut,) = [call for call in played.calls if call["finish_reason"] == "abort"]
        assert cut["completion_ids"] and not cut["delivered"]
    if cli.survives_hang_up:
        check_done(played)
