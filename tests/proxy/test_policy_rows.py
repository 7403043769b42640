"""Several named models at one service: whose a row is, how old it is, who may train it, and whose engines a name goes to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from reconstruct.accounting import settle
from reconstruct.builders import RowContext, merged
from reconstruct.codec import decode, encode
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import free_port
from tests.support.service.running_service import TRAINER, RunningService, Session, wait_until
from tests.support.sessions.calls import Talk
from trainer_client import TrainerClient
from trainer_client.batch import Batch

QUESTION = {"role": "user", "content": "hello"}


@pytest.fixture
def engines() -> Iterator[tuple[ScriptedEngine, ScriptedEngine]]:
    with ScriptedEngine() as default, ScriptedEngine(model="large") as named:
        yield default, named


@contextmanager
def serving(engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str, **settings: Any) -> Iterator[RunningService]:
    """The second engine is the policy b's."""
    default, named = engines
    with RunningService([default.url, f"b={named.url}"], redis_url, **settings) as service:
        wait_until(lambda: served(service) == 2, 60, "both serve")
        yield service


def served(service: RunningService) -> int:
    replicas = service.request("GET", "/engines").json()["replicas"]
    return sum(replica["status"] == "serving" for replica in replicas)


def of_both(service: RunningService, name: str) -> Session:
    """A session, closed, that has a row of each policy."""
    session = service.session(group_id=name, group_size=1)
    session.answer([QUESTION], model="policy", max_tokens=8)
    session.answer([QUESTION], model="b", max_tokens=8)
    session.close(reward=1.0)
    return session


@contextmanager
def trainer(service: RunningService) -> Iterator[TrainerClient]:
    with TrainerClient(service.url, TRAINER, consumer="t") as client:
        yield client


def taken(client: TrainerClient, **wanted: Any) -> Batch:
    batch = client.lease(**wanted)
    assert batch is not None
    return batch


# Whose a row is.


def test_a_session_that_changes_the_model_has_a_row_of_each_with_its_policy(
    engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str
) -> None:
    with serving(engines, redis_url) as service:
        session = service.session()
        first = session.answer([QUESTION], model="policy", max_tokens=8)
        second = session.answer([QUESTION, first, {"role": "user", "content": "and you?"}], model="b", max_tokens=8)
        session.answer([QUESTION, first, {"role": "user", "content": "and you?"}], model="large", max_tokens=8)
        session.answer([QUESTION, first, {"role": "user", "content": "go on"}, second, QUESTION], model="policy", max_tokens=8)
        rows, accounting = session.trajectories()
        found = [(row["policy"], len(row["call_ids"]), sum(row["loss_mask"])) for row in rows]
        lengths = [len(call["completion_ids"]) for call in session.calls]
        # What b said is context in the default's row, and trained in its own.
        assert sorted(found) == sorted([("", 2, lengths[0] + lengths[3]), ("b", 1, lengths[1]), ("b", 1, lengths[2])])
        assert accounting["exported_tokens"] == accounting["sampled_tokens"]
        weights = sorted((row["policy"], row["row_weight"]) for row in rows)
        assert weights == [("", 1.0), ("b", 0.5), ("b", 0.5)], "what a rollout has for a policy adds up to 1"
        assert sum(row["policy"] == "b" for row in session.trajectories("per_call")[0]) == 2


def test_a_name_that_goes_to_another_policy_than_before_begins_another_row(redis_url: str) -> None:
    """The service was started anew, with the same name for a policy of its own: what is asked looks like a continuation."""
    with ScriptedEngine() as before, ScriptedEngine() as after:
        with RunningService(before.url, redis_url) as service:
            session = service.session()
            first = session.answer([QUESTION], model="policy", max_tokens=8)
            session.answer([QUESTION, first, QUESTION], model="policy", max_tokens=8)
        with RunningService([f"policy={after.url}"], redis_url) as service:
            url, http = f"{service.url}/s/{session.session_id}/v1", httpx.Client(verify=False, timeout=120)
            with openai.OpenAI(base_url=url, api_key=session.api_key, max_retries=0, http_client=http) as client:
                again: Any = [QUESTION, first, QUESTION]
                client.chat.completions.create(model="policy", messages=again, max_tokens=8)
                client.chat.completions.create(model="policy", messages=[*again[:2], {"role": "user", "content": "x"}])
            answer = service.request("GET", f"/sessions/{session.session_id}/trajectories").json()
            calls = service.request("GET", f"/sessions/{session.session_id}/calls").json()["calls"]
        rows = answer["trajectories"]
        assert sorted((row["policy"], len(row["call_ids"])) for row in rows) == [("", 2), ("policy", 1), ("policy", 1)]
        assert [call["parent_id"] is None for call in calls] == [True, False, True, True]


def test_a_row_never_runs_through_calls_of_two_policies_whatever_the_records_say() -> None:
    """c2 leans on all of c1's ids and names it as its parent, and another policy sampled it.

    c1 [1 2] -> [3]; c2 of b [1 2 3 4] -> [5]; c3 of b [1 2 3 4 5 6] -> [7]
    """
    talk, of_b = Talk(), {"fields": {"marks": {"policy": "b"}}}
    talk.say("c1", [1, 2], [3])
    talk.go_on("c2", "c1", [4], [5], version=8, **of_b)
    talk.go_on("c3", "c2", [6], [7], version=9, **of_b)
    calls = [decode(encode(call)) for call in talk.calls]
    rows = merged(settle(calls), RowContext("s"))
    assert [(row.policy, row.call_ids, row.loss_mask.tolist()) for row in rows] == [
        ("", ("c1",), [0, 0, 1]),
        ("b", ("c2", "c3"), [0, 0, 0, 0, 1, 0, 1]),
    ]
    assert [[span.version for span in row.weight_versions] for row in rows] == [[0], [8, 9]]


# How old it is, and who trains it.


def test_two_trainers_train_two_policies_each_on_its_own_version_line(
    engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str, tmp_path: Path
) -> None:
    with serving(engines, redis_url) as service, trainer(service) as client:
        of_both(service, "g1")
        assert client.publish(tmp_path, 3, model="b").applied
        with taken(client, model="b", max_staleness=3) as batch:
            assert (batch.weight_version, dict(batch.weight_versions)) == (0, {"": 0, "b": 3})
            assert [(row.policy, row.group_id) for row in batch.rows] == [("b", "g1")]
            assert (batch.staleness.tolist(), batch.row_versions.tolist()) == ([3], [3])
            with taken(client, model="", max_staleness=0) as rest:
                assert [(row.policy, row.group_id) for row in rest.rows] == [("", "g1")]
                assert (rest.staleness.tolist(), rest.columns.row_weight.tolist()) == ([0], [1.0])
        assert service.request("GET", "/batches", TRAINER).json()["groups"]["acked"] == 2
        of_both(service, "g2")
        assert client.publish(tmp_path, 4, model="b").applied
        assert client.lease(model="b", max_staleness=0) is None
        with taken(client) as both:
            assert sorted((row.policy, age) for row, age in zip(both.rows, both.staleness, strict=True)) == [("", 0), ("b", 1)]


def test_a_lease_of_a_model_that_there_is_not_is_refused(
    engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str
) -> None:
    with serving(engines, redis_url) as service:
        refused = service.request("POST", "/batches/lease", TRAINER, json={"policy": "c"})
        assert (refused.status_code, refused.json()["error"]["message"]) == (404, "there is no model 'c'")
        assert service.request("POST", "/batches/lease", TRAINER, json={"policy": "b"}).status_code == 204


def test_rows_of_a_frozen_policy_are_nobodys_to_train(engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str) -> None:
    with serving(engines, redis_url, frozen_models=["b"]) as service, trainer(service) as client:
        of_both(service, "g")
        assert client.lease(model="b") is None
        with taken(client) as batch:
            assert [row.policy for row in batch.rows] == [""]


def test_sessions_are_held_back_by_the_policy_that_lies_furthest_behind(
    engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str, tmp_path: Path
) -> None:
    with (
        serving(engines, redis_url, admission={"staleness": 0, "groups_per_version": 1}) as service,
        trainer(service) as client,
    ):
        of_both(service, "g1")
        with taken(client, model=""):
            pass
        assert client.publish(tmp_path, 1).applied
        held = service.request("POST", "/sessions", json={"group_id": "g2"})
        assert (held.status_code, held.json()["error"]["code"]) == (429, "backpressure"), "b has not trained on the first yet"
        with taken(client, model="b"):
            pass
        assert client.publish(tmp_path, 1, model="b").applied
        assert service.request("POST", "/sessions", json={"group_id": "g2"}).status_code == 201
        assert "verbatim_admission_versions_ahead 1.0" in service.request("GET", "/metrics").text


# Whose engines a name goes to.


def refusal(session: Session, model: str) -> tuple[int, str]:
    with pytest.raises(openai.APIStatusError) as raised:
        session.answer([QUESTION], model=model, max_tokens=8)
    return raised.value.status_code, str(raised.value)


def test_a_name_that_may_be_an_unreached_policys_is_answered_by_nobody_until_that_is_known(
    engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str
) -> None:
    default, port = engines[0], free_port()
    with RunningService([default.url, f"judge=http://127.0.0.1:{port}"], redis_url) as service:
        wait_until(lambda: served(service) == 1, 60, "the default serves")
        session = service.session()
        session.answer([QUESTION], model="policy", max_tokens=8)
        status, why = refusal(session, "huge")
        assert status == 503 and "may be one of judge, whose engines were not reached yet" in why
        with ScriptedEngine(model="huge").start(port) as judge:
            wait_until(lambda: served(service) == 2, 60, "the judge serves")
            session.answer([QUESTION], model="huge", max_tokens=8)
            assert (len(judge.generations), len(default.generations)) == (1, 1)
            session.answer([QUESTION], model="tiny", max_tokens=8)
            assert len(default.generations) == 2, "now it is known that nobody goes by it"


def test_a_declared_name_goes_to_its_policy_though_no_engine_of_it_was_ever_reached(
    engines: tuple[ScriptedEngine, ScriptedEngine], redis_url: str
) -> None:
    nobody = f"http://127.0.0.1:{free_port()}"
    with RunningService([engines[0].url, f"judge={nobody}"], redis_url, policy_models={"judge": ["huge"]}) as service:
        wait_until(lambda: served(service) == 1, 60, "the default serves")
        session = service.session()
        status, why = refusal(session, "huge")
        assert status == 503 and "no engine can take the call" in why
        assert engines[0].generations == []
        session.answer([QUESTION], model="tiny", max_tokens=8)
        assert len(engines[0].generations) == 1, "all names of the judge are declared, and this is none"
