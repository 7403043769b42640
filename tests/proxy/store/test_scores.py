"""The contract of the store of scores, on a real Redis, plain and cluster."""

from __future__ import annotations

import numpy as np
import pytest

from proxy.errors import Conflict, NotFound, RequestError
from proxy.store import keys
from proxy.store.scores import ScoreStore
from proxy.store.states import SessionInfo
from reconstruct.scores import Score, encode_score, unscored
from tests.support.service.redis_server import Store


def score(*logprobs: float, policy: str = "teacher") -> Score:
    empty = np.zeros((len(logprobs), 0), np.float32)
    return Score(policy, "raw", np.array(logprobs, np.float32), empty.astype(np.int32), empty)


async def opened(store: Store, created_at: float = 100.0) -> ScoreStore:
    assert await store.sessions.create(SessionInfo("s1", b"hash", created_at))
    return ScoreStore(store.connection)


async def said(scores: ScoreStore) -> dict[tuple[str, str], list[float]]:
    loaded = await scores.load("s1")
    return {(call_id, name): each.logprobs.tolist() for call_id, named in loaded.items() for name, each in named.items()}


async def test_scores_come_back_by_call_and_scorer(store: Store) -> None:
    scores = await opened(store)
    await scores.keep("s1", "teacher", {"c1": score(-1.0, -2.0), "c=2": score(-3.0)})
    await scores.keep("s1", "raw", {"c1": score(-4.0, -5.0)})
    assert await said(scores) == {("c1", "teacher"): [-1.0, -2.0], ("c=2", "teacher"): [-3.0], ("c1", "raw"): [-4.0, -5.0]}


async def test_only_a_session_with_scores_says_that_it_has_some(store: Store) -> None:
    scores = await opened(store)
    state = await store.sessions.load("s1")
    assert state is not None and state.scored == 0 and await scores.load("s1") == {}
    await scores.keep("s1", "teacher", {"c1": score(-1.0)})
    state = await store.sessions.load("s1")
    assert state is not None and state.scored == 1


async def test_the_first_score_stays_unless_another_one_was_asked_for(store: Store) -> None:
    scores = await opened(store)
    await scores.keep("s1", "teacher", {"c1": score(-1.0)})
    await scores.keep("s1", "teacher", {"c1": score(-9.0), "c2": score(-2.0)})
    assert await said(scores) == {("c1", "teacher"): [-1.0], ("c2", "teacher"): [-2.0]}
    await scores.keep("s1", "teacher", {"c1": score(-9.0)}, replace=True)
    assert (await said(scores))["c1", "teacher"] == [-9.0]


async def test_scores_are_fixed_from_the_first_lease_on_and_a_repetition_is_no_change(store: Store) -> None:
    """A job that is repeated after its session was leased finds its work done; one that comes too late changes no row."""
    scores = await opened(store)
    await scores.keep("s1", "teacher", {"c1": score(-1.0)})
    await store.sessions.mark_leased("s1")
    await scores.keep("s1", "teacher", {"c1": score(-1.0)})
    await scores.keep("s1", "teacher", {"c1": score(-1.0)}, replace=True)
    for late, replace in (({"c1": score(-9.0)}, True), ({"c1": score(-1.0), "c2": score(-2.0)}, False)):
        with pytest.raises(Conflict, match="session s1 was leased to a trainer: its scores are fixed"):
            await scores.keep("s1", "teacher", late, replace=replace)
    assert await said(scores) == {("c1", "teacher"): [-1.0]}


async def test_a_session_that_is_gone_takes_no_scores_and_leaves_none(store: Store) -> None:
    scores = await opened(store)
    await scores.keep("s1", "teacher", {"c1": score(-1.0)}, created_at=100.0)
    await store.sessions.delete("s1")
    assert not await store.connection.execute("EXISTS", keys.scores("s1"))
    with pytest.raises(NotFound, match="session s1 was deleted before its scores by teacher were kept"):
        await scores.keep("s1", "teacher", {"c1": score(-1.0)})
    await opened(store, created_at=200.0)
    with pytest.raises(NotFound):
        await scores.keep("s1", "teacher", {"c1": score(-1.0)}, created_at=100.0)
    assert await scores.load("s1") == {}
    await scores.keep("s1", "teacher", {"c1": score(-1.0)}, created_at=200.0)


async def test_a_score_that_this_build_cannot_read_says_so_and_hides_no_other(store: Store) -> None:
    scores = await opened(store)
    await scores.keep("s1", "teacher", {"c1": score(-1.0)})
    await store.connection.execute("HSET", keys.scores("s1"), "teacher=c2", b"\x93")
    loaded = await scores.load("s1")
    assert loaded["c1"]["teacher"].logprobs.tolist() == [-1.0]
    assert len(loaded["c2"]["teacher"].logprobs) == 0 and "c2: a score of 1 bytes is damaged" in loaded["c2"]["teacher"].error


async def test_scores_are_loaded_for_archives_as_they_are_stored(store: Store) -> None:
    scores = await opened(store)
    failed = unscored(2, "teacher", "raw", "the scorer does not answer")
    await scores.keep("s1", "teacher", {"c1": failed})
    assert await scores.load_packed("s1") == {"teacher=c1": encode_score(failed)}


@pytest.mark.parametrize("name", ["", "a b", "a=b", "é", "x" * 65])
async def test_a_scorer_has_a_name_that_columns_can_bear(store: Store, name: str) -> None:
    scores = await opened(store)
    with pytest.raises(RequestError, match="a scorer's name is 1 to 64 letters"):
        await scores.keep("s1", name, {"c1": score(-1.0)})
