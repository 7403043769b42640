"""Batches with rows of several policies: each row is measured on its own policy's version line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from tests.support.service.scripted_service import Answer, ScriptedService, json_answer, serving
from tests.support.sessions.training_rows import groups, leased, trajectory
from trainer_client.batch import Batch
from trainer_client.client import TrainerClient
from trainer_client.errors import InvalidAnswer
from trainer_client.importance import batch_statistics

OF_BOTH = [trajectory("a", versions=[5, 6]), trajectory("b", versions=[1, 1, 2], policy="b")]
"""The default policy is at 7, b at 2: tokens 2, 1 and 1, 1, 0 versions behind."""


def both() -> Batch:
    return Batch(groups(OF_BOTH), 7, weight_versions={"b": 2})


@contextmanager
def asked(answer: Answer) -> Iterator[tuple[ScriptedService, TrainerClient]]:
    """A trainer at a service that leases with this answer."""
    with serving(ScriptedService()) as service:
        service.script("POST /batches/lease", answer)
        service.script("POST /batches/lease-1/nack", json_answer({"groups": ["g1"]}))
        with TrainerClient(service.url, "trainer-token", retry_seconds=5) as client:
            yield service, client


def test_a_row_is_as_old_as_its_own_policy_says() -> None:
    batch = both()
    assert (batch.weight_version, batch.weight_versions) == (7, {"": 7, "b": 2})
    assert (batch.staleness.tolist(), batch.row_versions.tolist()) == ([2, 1], [7, 2])
    data = batch.padded()
    found = batch_statistics(batch, data, np.asarray(data.inference_logprobs))
    ages = {name.split("/")[2] for name in found if name.startswith("importance/staleness/")}
    assert ages == {"0", "1", "2"}
    assert found["importance/staleness/0/tokens"] == 1 and found["importance/staleness/1/tokens"] == 3


def test_batches_that_are_joined_have_the_newest_version_of_each_policy() -> None:
    later = Batch(groups([trajectory("c", policy="c", versions=[1])]), 9, weight_versions={"b": 1, "c": 4})
    joined = Batch.join([both(), later])
    assert (joined.weight_version, joined.weight_versions) == (9, {"": 9, "b": 2, "c": 4})
    assert [row.trajectory_id for row in joined.rows] == ["a", "b", "c"]
    assert joined.staleness.tolist() == [4, 1, 3]


def test_rows_of_a_policy_whose_version_is_not_said_are_refused() -> None:
    with pytest.raises(ValueError, match="there is no weight version for the rows of 'b'"):
        Batch(groups(OF_BOTH), 7)


@pytest.mark.parametrize("encoding", ["json", "msgpack", "packed"])
def test_a_lease_of_one_policy_is_asked_for_and_read(encoding: str) -> None:
    answer = leased([OF_BOTH[1]], encoding=encoding, weight_versions={"": 7, "b": 2})
    with asked(answer) as (service, client):
        batch = client.lease(model="b")
        assert service.received[0].body["policy"] == "b"
        assert ([row.policy for row in batch.rows], batch.staleness.tolist()) == (["b"], [1])
        assert (batch.weight_version, batch.weight_versions) == (7, {"": 7, "b": 2})


def test_an_unknown_term_of_a_lease_is_refused() -> None:
    with asked(json_answer({})) as (_, client), pytest.raises(TypeError, match=r"a lease has no terms max_group$"):
        client.lease(max_group=1)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    "versions", [{}, {"weight_versions": {"": 7}}, {"weight_versions": {"b": "new"}}, {"weight_versions": 2}]
)
def test_an_answer_that_does_not_say_how_old_its_rows_are_is_invalid(versions: dict[str, Any]) -> None:
    with asked(leased([OF_BOTH[1]], **versions)) as (service, client):
        with pytest.raises(InvalidAnswer):
            client.lease()
        assert service.paths()[-1] == "/batches/lease-1/nack", "what cannot be used is given back"


def test_a_service_that_knows_no_policies_is_read_as_before() -> None:
    with asked(leased([OF_BOTH[0]])) as (service, client):
        batch = client.lease()
        assert "policy" not in service.received[0].body
        assert (batch.weight_versions, batch.staleness.tolist()) == ({"": 7}, [2])
