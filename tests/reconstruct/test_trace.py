"""A session's trace trains what its rows train, each token once and after the ids it was sampled after."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from proxy.rows import every_call_as_wire
from reconstruct.accounting import account, settle
from reconstruct.builders import Builder, merged, per_call
from reconstruct.codec import encode
from reconstruct.trace import is_trained_whole, trace_entries
from tests.reconstruct.test_properties import CONTEXT, FEWER, Drawn, sessions
from tests.support.sessions.calls import Talk


@FEWER
@pytest.mark.parametrize("build", [merged, per_call])
@given(drawn=sessions())
def test_sampled_tokens_are_those_of_the_trace_and_the_quarantined_ones(build: Builder, drawn: Drawn) -> None:
    records = drawn.records
    settled = settle(records)
    rows = build(settled, CONTEXT)
    accounting = account(settled, rows)
    wire = list(every_call_as_wire([encode(call) for call in records], (), (), ()))
    entries = list(trace_entries(wire, rows))
    trained = sum(sum(entry["loss_mask"]) for entry in entries)
    assert trained == accounting.exported_tokens
    assert accounting.sampled_tokens == trained + sum(item.tokens for item in accounting.quarantined)
    ids = [entry["metadata"]["node_id"] for entry in entries]
    assert len(set(ids)) == len(ids)
    told = {item.call_id: item for item in drawn.told}
    for entry in entries:
        call = told[entry["metadata"]["node_id"]]
        assert tuple(entry["prompt_token_ids"]) == call.prompt and tuple(entry["completion_token_ids"]) == call.said
        assert len(entry["loss_mask"]) == len(call.prompt + call.said) and not any(entry["loss_mask"][: len(call.prompt)])
        assert entry["per_token_logps"] == list(call.logprobs)
    roles = [entry["metadata"]["role"] == "main" for entry in entries]
    assert roles == sorted(roles)


def test_rows_of_other_calls_are_refused() -> None:
    """[1] -> 2 3"""
    talk = Talk()
    talk.say("a", (1,), (2, 3))
    (row,) = merged(settle(talk.calls), CONTEXT)
    wire = list(every_call_as_wire([encode(call) for call in talk.calls], (), (), ()))
    assert [entry["loss_mask"] for entry in trace_entries(wire, [row])] == [[0, 1, 1]]
    with pytest.raises(ValueError, match="2 tokens of calls that are not given"):
        list(trace_entries([], [row]))
    with pytest.raises(ValueError, match="after other ids"):
        list(trace_entries(wire, [replace(row, token_ids=np.array([4, 2, 3], np.int32))]))


def test_a_logprob_that_rounding_left_above_zero_is_zero_in_a_trace() -> None:
    """OpenEnv refuses it, and with it the whole rollout: TRL's worker would stop."""
    talk = Talk()
    talk.say("a", (1,), (2, 3), logprobs=[-0.5, 5e-5])
    wire = list(every_call_as_wire([encode(call) for call in talk.calls], (), (), ()))
    (entry,) = trace_entries(wire, merged(settle(talk.calls), CONTEXT))
    assert entry["per_token_logps"] == [-0.5, 0.0]


@pytest.mark.parametrize(
    ("change", "whole"),
    [
        ({}, True),
        ({"media": [{"digest": "d", "kind": "image", "start": 0, "end": 1}]}, False),
        ({"completion_ids": [2, 3, 4]}, False),
        ({"completion_ids": []}, False),
        ({"call_id": "another"}, False),
    ],
)
def test_ids_alone_say_a_call_if_all_of_it_is_trained_and_nothing_was_seen(change: dict[str, Any], whole: bool) -> None:
    """[1] -> 2 3"""
    talk = Talk()
    talk.say("a", (1,), (2, 3))
    (row,) = merged(settle(talk.calls), CONTEXT)
    (call,) = every_call_as_wire([encode(call) for call in talk.calls], (), (), ())
    assert is_trained_whole(row, {**call, **change}) is whole
    unlearned = replace(row, loss_mask=np.array([0, 1, 0], np.int8))
    assert not is_trained_whole(unlearned, call)
