"""What a lease tells of its sessions, and what it may ask for: roles, builders, complete sessions. Over HTTP, on a real Redis."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgpack
import numpy as np
import pytest
from pydantic import ValidationError

from proxy.errors import Conflict
from proxy.settings import Settings
from proxy.store.scores import ScoreStore
from proxy.store.states import Intent
from reconstruct.codec import encode
from reconstruct.records import Call
from reconstruct.scores import Score
from reconstruct.spans import Span
from tests.support.distributions import Distributions
from tests.support.service.redis_server import Store
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.sessions.calls import Talk
from trainer_client import TrainerClient
from trainer_client.wire import Group, decode_trajectory

NO_ENGINE = "http://127.0.0.1:9"
OTHER_AGENT: dict[str, Any] = {"role": "subagent", "role_source": "declared"}
UNTRAINED: dict[str, Any] = {"trainable": False, "quarantine_reason": "no_token_ids"}


@contextmanager
def serving(redis_url: str, **settings: Any) -> Iterator[RunningService]:
    with RunningService(NO_ENGINE, redis_url, **settings) as service:
        yield service


@pytest.fixture
def dead_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that gives no sign of life is dead without a wait for one."""
    monkeypatch.setattr("proxy.call.peers.DEAD_SECONDS", 0.0)


def closed(service: RunningService, url: str, talk: Talk, *, dangling: Sequence[str] = (), **fields: Any) -> None:
    """The session of `talk` as a store has it, closed with reward 1; `dangling` are calls that were begun and came to nothing."""
    created = service.request("POST", "/sessions", json={"session_id": talk.session, **fields})
    assert created.status_code == 201, created.text
    asyncio.run(kept(url, talk.session, talk.calls, dangling))
    body = {"status": "completed", "reward": 1.0}
    assert service.request("POST", f"/sessions/{talk.session}/close", json=body).status_code == 200


async def kept(url: str, session_id: str, calls: Sequence[Call], dangling: Sequence[str]) -> None:
    store = Store.at(url)
    for made in calls:
        await store.sessions.commit(session_id, made.call_id, {made.call_id: encode(made)})
    for call_id in dangling:
        begun = await store.sessions.begin(session_id, len(calls), Intent(call_id, None, b"d", "r1", 9.0))
        assert begun.accepted
    await store.connection.close()


def working(session: str, *, middle: dict[str, Any] | None = None) -> Talk:
    """One conversation of three calls: 1 | 2, then 3 | 4 of `middle`, then 5 | 6; and a sub-agent's: 7 | 8 9."""
    talk = Talk(session)
    talk.say("c1", [1], [2])
    talk.go_on("c2", "c1", [3], [4], fields=middle)
    talk.go_on("c3", "c2", [5], [6])
    talk.say("c4", [7], [8, 9], fields=OTHER_AGENT)
    return talk


def leased(service: RunningService, **terms: Any) -> dict[str, list[dict[str, Any]]]:
    """The rows of each group of a lease, which is given back."""
    answer = service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 100, **terms})
    assert answer.status_code in (200, 204), answer.text
    if answer.status_code == 204:
        return {}
    lease = answer.json()
    assert service.request("POST", f"/batches/{lease['lease_id']}/nack", TRAINER).status_code == 200
    return {group["group_id"]: group["trajectories"] for group in lease["groups"]}


@pytest.mark.case(57)
def test_every_leased_session_tells_what_became_of_all_that_was_sampled(redis_url: str, dead_at_once: None) -> None:
    """52. The old bug: a session whose last call had died with its process passed for whole."""
    with serving(redis_url) as service, TrainerClient(service.url, TRAINER) as trainer:
        closed(service, redis_url, working("whole"))
        closed(service, redis_url, working("died"), dangling=["c5"])
        closed(service, redis_url, working("holed", middle=UNTRAINED))
        batch = trainer.lease(max_groups=3)
        assert batch is not None
        with batch:
            told = {session.session_id: session for group in batch.groups for session in group.sessions}
        lost = {name: [(item.call_id, item.tokens, item.reason) for item in each.quarantined] for name, each in told.items()}
        assert lost == {"whole": [], "died": [("c5", 0, "dangling")], "holed": [("c2", 1, "no_token_ids")]}
        assert {name: (each.sampled_tokens, each.exported_tokens) for name, each in told.items()} == {
            "whole": (5, 5),
            "died": (5, 5),
            "holed": (5, 4),
        }
        assert {name: (each.dangling_calls, each.complete) for name, each in told.items()} == {
            "whole": (0, True),
            "died": (1, False),
            "holed": (0, False),
        }
        accounting = service.request("GET", "/sessions/died/trajectories").json()["accounting"]
        assert (accounting["dangling_calls"], accounting["complete"]) == (1, False)


@pytest.mark.case(57)
def test_a_lease_of_complete_sessions_leaves_the_others_to_those_who_take_them(redis_url: str, dead_at_once: None) -> None:
    with serving(redis_url) as service:
        closed(service, redis_url, working("died"), dangling=["c5"])
        assert leased(service, complete_only=True, consumer="strict") == {}
        closed(service, redis_url, working("one"), group_id="pair", group_size=2)
        closed(service, redis_url, working("two", middle=UNTRAINED), group_id="pair", group_size=2)
        closed(service, redis_url, working("whole"))
        assert leased(service, complete_only=True, consumer="strict").keys() == {"whole"}
        assert leased(service, consumer="any").keys() == {"died", "pair", "whole"}


@pytest.mark.parametrize(
    ("roles", "calls", "weights"),
    [
        (None, [["c1", "c2", "c3"], ["c4"]], [0.5, 0.5]),
        (["main"], [["c1", "c2", "c3"]], [1.0]),
        (["subagent"], [["c4"]], [1.0]),
        (["side"], [], []),
    ],
)
def test_a_lease_gives_the_rows_of_the_roles_it_asks_for(
    redis_url: str, roles: list[str] | None, calls: list[list[str]], weights: list[float]
) -> None:
    """What a rollout has in a batch adds up to 1 among the rows that are given."""
    with serving(redis_url) as service, TrainerClient(service.url, TRAINER) as trainer:
        closed(service, redis_url, working("s"))
        batch = trainer.lease(roles=roles)
        assert batch is not None
        with batch:
            assert [list(row.call_ids) for row in batch.rows] == calls
            assert [row.row_weight for row in batch.rows] == weights
            assert batch.groups[0].sessions[0].exported_tokens == 5, "of the whole session"


def test_a_label_that_text_gave_does_not_keep_a_row_from_a_lease_of_the_agents_own_work(redis_url: str) -> None:
    talk = Talk("s")
    talk.say("c1", [1], [2], fields={"role": "compaction", "role_source": "inferred"})
    with serving(redis_url) as service:
        closed(service, redis_url, talk)
        (row,) = leased(service, roles=["main"])["s"]
        assert (row["role"], row["role_source"]) == ("compaction", "inferred")
        assert leased(service, roles=["compaction"])["s"] == []


def test_a_lease_is_built_by_the_builder_it_asks_for(redis_url: str) -> None:
    with serving(redis_url) as service, TrainerClient(service.url, TRAINER) as trainer:
        closed(service, redis_url, working("s"))
        assert [row["call_ids"] for row in leased(service)["s"]] == [["c1", "c2", "c3"], ["c4"]]
        batch = trainer.lease(builder="per_call")
        assert batch is not None
        with batch:
            assert [list(row.call_ids) for row in batch.rows] == [["c1"], ["c2"], ["c3"], ["c4"]]


def test_the_services_builder_makes_the_rows_of_leases_and_groups_are_counted_by_them(redis_url: str) -> None:
    """Two sessions of four calls each: eight rows, of which a trainer of seven gets the first four."""
    with serving(redis_url, builder="per_call") as service:
        for session in ("one", "two"):
            closed(service, redis_url, working(session))
        given = leased(service, max_groups=None, max_trajectories=7)
        assert {name: len(rows) for name, rows in given.items()} == {"one": 4}
        assert len(service.request("GET", "/sessions/one/trajectories").json()["trajectories"]) == 4


BUILDERS = """
from reconstruct.builders import per_call

def newest_first(settled, context):
    return per_call(settled, context)[::-1]

def broken(settled, context):
    raise ValueError("no rows today")
"""


@pytest.fixture
def own_builders(distributions: Distributions) -> None:
    """An installed distribution with three builders: one that works, one that raises, one that cannot be imported."""
    points = [f"{name} = builders_of_mine:{name}" for name in ("newest_first", "broken", "gone")]
    distributions.install("builders-of-mine", "verbatim.builders", *points, builders_of_mine=BUILDERS)


@pytest.mark.case(58)
def test_a_builder_of_ones_own_reaches_a_lease(redis_url: str, own_builders: None) -> None:
    """53."""
    with serving(redis_url, builder="newest_first") as service:
        closed(service, redis_url, working("s"))
        assert [row["call_ids"] for row in leased(service)["s"]] == [["c4"], ["c3"], ["c2"], ["c1"]]
        assert [row["call_ids"] for row in leased(service, builder="merged")["s"]] == [["c1", "c2", "c3"], ["c4"]]


@pytest.mark.parametrize(
    ("builder", "says"),
    [
        ("best", "there is no builder 'best': choose one of "),
        ("broken", "makes no rows of group s: the builder 'broken' failed on session s: ValueError('no rows today')"),
        ("gone", "the builder 'gone' (builders_of_mine:gone of builders-of-mine 1.0) cannot be loaded: "),
    ],
)
def test_a_lease_by_a_builder_that_gives_nothing_is_refused_and_its_groups_stay(
    redis_url: str, own_builders: None, builder: str, says: str
) -> None:
    with serving(redis_url, group={"max_deliveries": 1}) as service:
        closed(service, redis_url, working("s"))
        for _ in range(2):
            answer = service.request("POST", "/batches/lease", TRAINER, json={"builder": builder})
            assert answer.status_code == 400
            assert says in answer.json()["error"]["message"]
        assert leased(service).keys() == {"s"}, "it counts as no delivery"


@pytest.mark.parametrize("builder", ["best", "gone"])
def test_a_service_whose_builder_is_not_there_does_not_start(own_builders: None, builder: str) -> None:
    with pytest.raises(ValidationError, match=builder):
        Settings(builder=builder)


@pytest.mark.parametrize(
    ("of_service", "of_session", "usable"),
    [(None, None, True), (0.2, None, True), (0.19, None, False), (0.19, 0.2, True), (None, 0.1, False)],
)
def test_a_session_that_lost_more_than_its_group_allows_is_not_usable(
    redis_url: str, of_service: float | None, of_session: float | None, usable: bool
) -> None:
    """One token of five is lost."""
    with serving(redis_url, group={"max_quarantined_share": of_service}) as service:
        rule: dict[str, Any] = {} if of_session is None else {"max_quarantined_share": of_session}
        closed(service, redis_url, working("s", middle=UNTRAINED), group_policy="drop", **rule)
        assert (leased(service).keys() == {"s"}) == usable


def test_what_is_left_out_by_choice_is_not_lost(redis_url: str) -> None:
    judged = working("s", middle={"trainable": False, "quarantine_reason": "frozen_model"})
    with serving(redis_url, group={"max_quarantined_share": 0.0}, train_roles=["main", "inferred_side"]) as service:
        closed(service, redis_url, judged)
        assert [row["call_ids"] for row in leased(service, complete_only=True)["s"]] == [["c1", "c2", "c3"]]


def test_a_group_of_an_earlier_service_tells_no_sessions() -> None:
    assert Group("g", ()).sessions == ()


async def keep(url: str, session_id: str, scorer: str, by_call: dict[str, Score], **how: bool) -> None:
    store = Store.at(url)
    try:
        await ScoreStore(store.connection).keep(session_id, scorer, by_call, **how)
    finally:
        await store.connection.close()


def say(*logprobs: float) -> Score:
    count = len(logprobs)
    best = np.arange(2 * count, dtype=np.int32).reshape(count, 2)
    values = np.full((count, 2), -0.5, np.float32)
    return Score("teacher", "raw", np.array(logprobs, np.float32), best, values, (Span(3, 0, count),))


@pytest.mark.parametrize("accept", ["application/json", "application/msgpack", "application/msgpack;arrays=packed"])
def test_a_lease_has_the_scores_of_its_rows_and_has_them_again_when_it_is_delivered_again(redis_url: str, accept: str) -> None:
    """A score that comes after the first delivery would make other rows of it."""
    with serving(redis_url) as service:
        closed(service, redis_url, working("s"))
        asyncio.run(keep(redis_url, "s", "teacher", {"c1": say(-1.0), "c3": say(-3.0), "c4": say(-4.0, -5.0)}))
        delivered = []
        for _ in range(2):
            answer = service.request("POST", "/batches/lease", TRAINER, json={}, headers={"accept": accept})
            lease = json.loads(answer.content) if accept.endswith("json") else msgpack.unpackb(answer.content)
            delivered.append([decode_trajectory(row) for row in lease["groups"][0]["trajectories"]])
            service.request("POST", f"/batches/{lease['lease_id']}/nack", TRAINER)
            with pytest.raises(Conflict, match="its scores are fixed"):
                asyncio.run(keep(redis_url, "s", "teacher", {"c1": say(-9.0)}, replace=True))
        for main, other in delivered:
            assert main.token_ids.tolist() == [1, 2, 3, 4, 5, 6]
            score = main.scores["teacher"]
            np.testing.assert_array_equal(score.logprobs, np.array([np.nan, -1.0, np.nan, np.nan, np.nan, -3.0], np.float32))
            assert score.top_ids.tolist() == [[-1, -1], [0, 1], [-1, -1], [-1, -1], [-1, -1], [0, 1]]
            assert (score.policy, score.mode, score.error) == ("teacher", "raw", "c2 is not scored")
            assert score.weight_versions == (Span(3, 1, 2), Span(3, 5, 6))
            np.testing.assert_array_equal(other.scores["teacher"].logprobs, np.array([np.nan, -4.0, -5.0], np.float32))


def test_a_session_without_scores_is_leased_as_ever(redis_url: str) -> None:
    with serving(redis_url) as service:
        closed(service, redis_url, working("s"))
        assert all("scores" not in row for row in leased(service)["s"])
