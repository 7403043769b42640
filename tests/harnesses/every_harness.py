"""The tests that every command-line agent has to pass; a test module of one agent imports them all and names its `CLI`.

The agent is real and runs by its shipped definition, and so are the service, Redis, tokenizer and chat template. What the model
says is scripted: calls of the agent's own tools, turn after turn. Each kind of run is made once and looked at by several tests.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.harnesses import figures
from tests.harnesses.agent_run import RARE, Cli, Tools
from tests.harnesses.player import Act, Step
from tests.harnesses.scratch import FILES
from tests.harnesses.stage import Played, Stage
from tests.harnesses.truths import check_continuations, check_records, check_rows, false_forks, unrecorded
from tests.support.engine.scripted_engine import Drop, Fail

KEEPALIVE_SECONDS = 0.5
"""The service's, in all these tests."""
SLOW_SECONDS = 2.0


@pytest.fixture(scope="module")
def cli(request: pytest.FixtureRequest) -> Cli:
    found: Cli = request.module.CLI
    return found


@pytest.fixture(scope="module")
def tools(cli: Cli) -> Tools:
    assert cli.tools is not None
    return cli.tools


@pytest.fixture(scope="module")
def plain(cli: Cli, stage: Stage) -> Played:
    """A run of several turns in which nothing goes wrong; the first token of one is slow."""
    steps: list[Step] = list(cli.steps(stage.workdir(cli, "plain")))
    steps[cli.change_at] = replace(steps[cli.change_at], how={"seconds_before": SLOW_SECONDS})
    return stage.play(cli, steps, "plain")


def acts_with(cli: Cli, stage: Stage, name: str, changed: Act) -> list[Act]:
    """The plain run, with `changed` in front of the step that edits the file."""
    steps: list[Step] = list(cli.steps(stage.workdir(cli, name)))
    return [*steps[: cli.change_at], changed, *steps[cli.change_at :]]


def check_done(played: Played) -> None:
    """The agent ended well, has done its task, and heard every step of the model once."""
    assert played.ended.exit_code == 0, str(played.ended)
    assert played.text_of("number.py") == "value = 42\n", str(played.ended)
    assert played.player.missing == []
    assert played.player.surplus == []
    assert played.player.left == 0


def check_truths(played: Played) -> None:
    check_records(played)
    check_rows(played)
    check_continuations(played)
    assert false_forks(played) == []


def test_the_file_is_edited_as_the_model_said(plain: Played, request: pytest.FixtureRequest) -> None:
    figures.note(request, plain)
    check_done(plain)
    for name in FILES.keys() - {"number.py"}:
        assert plain.text_of(name) == FILES[name]


def test_every_call_of_the_engine_is_recorded_once(plain: Played) -> None:
    check_records(plain)
    assert unrecorded(plain) == []
    assert all(call["status"] == "finished" and call["delivered"] for call in plain.calls)


def test_every_endpoint_that_it_asks_for_is_there(plain: Played) -> None:
    assert plain.unknown == []


def test_one_conversation_is_one_main_row(plain: Played) -> None:
    assert len(plain.main_calls) == len(plain.cli.steps(plain.workdir))
    assert len(plain.main_rows) == 1 + len(plain.cli.branches)
    assert plain.branches == plain.cli.branches


def test_sampled_tokens_are_exported_once_or_quarantined(plain: Played) -> None:
    check_rows(plain)
    said = [call for call in plain.calls if call["role"] in ("side", "compaction") and call["role_source"] != "inferred"]
    side = sum(len(call["completion_ids"]) for call in said)
    assert sum(item["tokens"] for item in plain.accounting["quarantined"]) == side


def test_each_turn_is_sampled_after_the_very_ids_of_the_turn_before(plain: Played) -> None:
    check_continuations(plain)
    assert false_forks(plain) == []


def test_side_calls_have_roles_of_their_own(plain: Played) -> None:
    assert Counter(plain.side_roles) == Counter(plain.cli.side_roles)


def test_a_slow_first_token_is_waited_for(plain: Played) -> None:
    """The agent does not ask again meanwhile."""
    assert SLOW_SECONDS > 3 * KEEPALIVE_SECONDS
    assert len(plain.generations) == len(plain.calls)


def test_replies_are_streamed_where_the_agent_asks_for_it(plain: Played) -> None:
    assert {generation.stream for generation in plain.generations} == {plain.cli.streams}


@pytest.mark.case(91)
def test_a_fork_replays_the_run_as_far_as_its_last_call(plain: Played, stage: Stage) -> None:
    """The agent runs again in a fresh folder, and so do its tools; of all its requests the engine gets the last one."""
    if plain.cli.fork_policy is None:
        check_partly_replayed(plain, stage)
        return
    forked = stage.fork(plain, plain.cli.steps(plain.workdir)[-1:], "plain")
    assert forked.ended.exit_code == 0, str(forked.ended)
    last = plain.main_calls[-1]
    *replayed, pivot = forked.calls
    assert [call["call_id"] for call in replayed] == [call["call_id"] for call in plain.calls if call is not last]
    assert {call["session_id"] for call in replayed} == {plain.session_id}
    assert (pivot["replay"], len(forked.generations)) == ("pivot", 1)
    assert forked.text_of("number.py") == plain.text_of("number.py") == "value = 42\n"
    assert forked.accounting["sampled_tokens"] == forked.accounting["exported_tokens"] == len(pivot["completion_ids"])
    if plain.cli.fork_policy == "strict":
        assert pivot["prompt_ids"] == last["prompt_ids"]


def check_partly_replayed(plain: Played, stage: Stage) -> None:
    """The requests differ in some runs: as far as they do not, they are replayed; the engine gets the others, in the same order."""
    steps = plain.cli.steps(plain.workdir)

    def turns(prompt: str) -> int:
        return prompt.count("<|im_start|>assistant")

    places = [turns(generation.prompt) for generation in plain.generations]

    def step_at(prompt: str) -> Step:
        return steps[places.index(turns(prompt))]

    forked = stage.fork(plain, [step_at] * len(steps), "plain")
    assert forked.ended.exit_code == 0, str(forked.ended)
    assert forked.text_of("number.py") == "value = 42\n"
    replayed = [call["call_id"] for call in forked.calls if call["session_id"] == plain.session_id]
    sampled = [call for call in forked.calls if call["session_id"] == forked.session_id]
    assert replayed == [call["call_id"] for call in plain.calls][: len(replayed)]
    assert len(replayed) + len(sampled) == len(forked.calls) == len(plain.calls)
    assert len(sampled) == len(forked.generations) > 0
    first, *others = [call["replay"] for call in sampled]
    # What goes on from a sampled reply is not held against the record.
    assert first in ("pivot", "diverged") and {*others} <= {"diverged", None}
    assert forked.accounting["sampled_tokens"] == sum(len(call["completion_ids"]) for call in sampled)


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


def test_two_tool_calls_in_one_reply_are_both_made(cli: Cli, tools: Tools, stage: Stage) -> None:
    workdir = stage.workdir(cli, "parallel")
    steps: Sequence[Step] = [
        Step("", "Both at once.", [tools.read(workdir / "number.py"), tools.read(workdir / "notes.txt")]),
        Step("", "", [tools.edit(workdir / "number.py", "41", "42"), tools.shell("git rev-parse --git-dir > git.txt")]),
        cli.steps(workdir)[-1],
    ]
    played = stage.play(cli, steps, "parallel")
    check_done(played)
    check_truths(played)
    assert played.text_of("git.txt") == ".git\n"
    assert [len(call["reply"].get("tool_calls") or ()) for call in played.main_calls][:2] == [2, 2]
    assert len(played.main_rows) == 1
    assert FILES["notes.txt"].strip() in played.generations[1].prompt


@pytest.mark.case(23)
def test_malformed_arguments_stay_as_they_were_sampled(cli: Cli, tools: Tools, raw_stage: Stage) -> None:
    """The JSON of a tool call is cut. Agents repair it, refuse it, or ask again; none of this touches what was sampled."""
    workdir = raw_stage.workdir(cli, "malformed")
    name, arguments = tools.read(workdir / "number.py")
    text = raw_stage.family.speak(calls=[(name, arguments)])
    steps = [
        Step("", "I look at the notes first.", [tools.read(workdir / "notes.txt")]),
        Step(raw=text.replace('.py"}', "")),
        Step("", "", [tools.read(workdir / "number.py")]),
        Step("", "", [tools.edit(workdir / "number.py", "41", "42")]),
        cli.steps(workdir)[-1],
    ]
    played = raw_stage.play(cli, steps, "malformed")
    check_done(played)
    check_truths(played)
    (cut, *_) = [call for call in played.main_calls if _is_cut(call["reply"])]
    assert "<|message|>" + cut["reply"]["tool_calls"][0]["function"]["arguments"] in steps[1].raw
    assert [call["branch_reason"] for call in played.main_calls] == list(cli.malformed)


def _is_cut(reply: dict[str, Any]) -> bool:
    return any(not call["function"]["arguments"].endswith("}") for call in reply.get("tool_calls") or ())
