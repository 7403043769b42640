"""What is recorded of every agent's plain run, be it made now or sent again."""

from __future__ import annotations

from collections import Counter

from tests.harnesses.stage import Played
from tests.harnesses.truths import check_continuations, check_records, check_rows, false_forks, unrecorded


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


def test_replies_are_streamed_where_the_agent_asks_for_it(plain: Played) -> None:
    assert {generation.stream for generation in plain.generations} == {plain.cli.streams}
