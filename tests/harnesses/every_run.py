"""What every agent does in a plain run, and in a fork of it."""

from __future__ import annotations

import pytest

from tests.harnesses import figures
from tests.harnesses.conftest import KEEPALIVE_SECONDS, SLOW_SECONDS
from tests.harnesses.every_record import *  # noqa: F403
from tests.harnesses.player import Step
from tests.harnesses.scratch import FILES
from tests.harnesses.stage import Played, Stage
from tests.harnesses.truths import check_done


def test_the_file_is_edited_as_the_model_said(plain: Played, request: pytest.FixtureRequest) -> None:
    figures.note(request, plain)
    check_done(plain)
    for name in FILES.keys() - {"number.py"}:
        assert plain.text_of(name) == FILES[name]


def test_a_slow_first_token_is_waited_for(plain: Played) -> None:
    """The agent does not ask again meanwhile."""
    assert SLOW_SECONDS > 3 * KEEPALIVE_SECONDS
    assert len(plain.generations) == len(plain.calls)


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
