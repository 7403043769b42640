"""Builders by name: those of `reconstruct`, and one that an installed package adds."""

from __future__ import annotations

import pytest

from contract.plugins import UnknownPlugin
from proxy.builders import plugins
from reconstruct.accounting import settle
from reconstruct.builders import RowContext, merged, per_call
from tests.support.distributions import Distributions
from tests.support.sessions.calls import call

LONGEST_FIRST = """
from reconstruct.builders import merged

def build(settled, context):
    return sorted(merged(settled, context), key=lambda row: -len(row.token_ids))
"""


def test_builders_are_found_by_name() -> None:
    assert plugins().load("merged") is merged
    assert plugins().load("per_call") is per_call


def test_a_builder_is_added_by_an_entry_point(distributions: Distributions) -> None:
    distributions.install(
        "longest-first", "verbatim.builders", "longest_first = longest_first:build", longest_first=LONGEST_FIRST
    )
    calls = [call("c1", delta=[1], said=[2]), call("c2", delta=[1, 2, 3], said=[4])]
    rows = plugins().load("longest_first")(settle(calls), RowContext("s"))
    assert [row.token_ids.tolist() for row in rows] == [[1, 2, 3, 4], [1, 2]]
    with pytest.raises(UnknownPlugin, match="choose one of longest_first, merged, per_call"):
        plugins().load("best")
