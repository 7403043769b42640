"""Where sessions go: rendezvous hashing moves only a lost or added replica's share; policies by the name that was asked for."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proxy.engine.pool.adapters import follow_adapters
from proxy.engine.pool.membership import Membership, replica_at, resolve_with_system
from proxy.engine.pool.policies import catalogue, find_policy, is_frozen
from proxy.engine.pool.pool import EnginePool
from proxy.engine.pool.seats import rank_replicas
from proxy.engine.replica import Replica, Served
from proxy.errors import EngineUnavailable, NotFound
from proxy.settings import Settings

SESSIONS = [f"session-{number}" for number in range(2000)]


def replicas(count: int, first: int = 0) -> list[Replica]:
    return [replica_at(f"http://10.0.0.{number}:8000") for number in range(first, first + count)]


def homes(members: list[Replica]) -> dict[str, str]:
    return {session: rank_replicas(session, members)[0].name for session in SESSIONS}


@pytest.mark.case(51)
@settings(max_examples=25)
@given(count=st.integers(1, 8), first=st.integers(0, 200), lost=st.integers(0, 8))
def test_adding_or_losing_a_replica_moves_its_share_and_nothing_else(count: int, first: int, lost: int) -> None:
    """Of n + 1 replicas one is taken away, or put back: about 1/(n + 1) of the sessions move, all to it or from it."""
    more = replicas(count + 1, first)
    changed = more[lost % len(more)]
    before, after = homes(more), homes([replica for replica in more if replica is not changed])
    moved = [session for session in SESSIONS if before[session] != after[session]]
    assert {before[session] for session in moved} <= {changed.name}
    share = len(SESSIONS) / (count + 1)
    # Six standard deviations of a binomial: chance does not reach it in a million runs.
    assert abs(len(moved) - share) <= 6 * (share * (1 - 1 / (count + 1))) ** 0.5


@given(count=st.integers(2, 8), lost=st.integers(0, 7))
def test_the_sessions_of_a_lost_replica_go_to_their_second_choice(count: int, lost: int) -> None:
    members = replicas(count)
    gone = members[lost % count]
    left = [replica for replica in members if replica is not gone]
    for session in SESSIONS[:200]:
        wanted = rank_replicas(session, members)
        if wanted[0] is gone:
            assert rank_replicas(session, left)[0] is wanted[1]


@given(order=st.permutations(range(5)))
def test_every_process_prefers_the_same_whatever_order_it_knows_them_in(order: list[int]) -> None:
    members = replicas(5)
    shuffled = [members[number] for number in order]
    assert all(rank_replicas(session, shuffled) == rank_replicas(session, members) for session in SESSIONS[:50])


def serving(policy: str, *models: str, healthy: bool = True) -> Replica:
    replica = replica_at(f"http://{policy or 'default'}-{'-'.join(models)}:8000")
    replica.policy, replica.models, replica.names, replica.healthy = policy, models, models, healthy
    return replica


def with_adapters(base: Replica, *adapters: str) -> list[Replica]:
    """The replica of a base model and those of its adapters, each a policy by its own name."""
    base.cards = {name: f"/adapters/{name}" for name in adapters}
    follow_adapters(base, [base], Membership([base.url], None, resolve_with_system))
    for replica in base.adapters:
        replica.healthy, replica.served = base.healthy, Served(f"{replica.adapter}@v5.1.00000000", True, 5)
    return [*base.engine]


def test_a_call_goes_to_the_policy_it_names_then_to_one_that_serves_the_model_then_to_the_default_one() -> None:
    members = [serving("", "base"), serving("judge", "large"), serving("critic", "small", "tiny")]
    named = {"", "judge", "critic"}
    for model, policy in [("judge", "judge"), ("large", "judge"), ("tiny", "critic"), ("base", ""), ("gpt-5", ""), ("", "")]:
        assert find_policy(model, members, named) == policy


def test_a_policy_that_is_down_is_not_answered_by_another() -> None:
    members = [serving("", "base"), serving("judge", "large", healthy=False)]
    assert find_policy("judge", members, {"", "judge"}) == "judge"
    assert find_policy("large", members, {"", "judge"}) == "judge"
    assert find_policy("nobody-yet", members, {"", "nobody-yet"}) == "nobody-yet"


def test_a_model_that_two_policies_serve_is_the_default_ones_if_that_is_one_of_them() -> None:
    assert find_policy("m", [serving("b", "m"), serving("", "m")], {"b", ""}) == ""
    assert find_policy("m", [serving("b", "m"), serving("a", "m")], {"a", "b"}) == "a"


def test_a_name_that_nobody_is_known_by_may_be_that_of_a_policy_that_was_not_met() -> None:
    members = [serving("", "base"), serving("judge")]
    assert not members[1].met
    with pytest.raises(EngineUnavailable, match="'large' is not known, and may be one of critic, judge, whose engines"):
        find_policy("large", members, {"", "judge", "critic"})
    assert find_policy("base", members, {"", "judge"}) == "", "the default's own name is known"
    assert find_policy("", members, {"", "judge"}) == ""
    members[1].api = "chat"
    assert find_policy("large", members, {"", "judge"}) == "", "it was met, and lists no models"


def test_a_declared_name_goes_to_its_policy_whoever_serves_it() -> None:
    declared = {"large": "judge", "small": ""}
    members = [serving("", "large"), serving("judge", "small")]
    assert find_policy("large", members, {"", "judge"}, declared) == "judge"
    assert find_policy("small", members, {"", "judge"}, declared) == ""
    assert find_policy("tiny", [serving("", "base")], {"", "judge"}, declared) == "", "the judge's names are all declared"
    with pytest.raises(NotFound, match="there are: judge"):
        find_policy("small", [], {"judge"}, declared)


def test_without_a_default_policy_an_unknown_model_is_refused_with_those_there_are() -> None:
    with pytest.raises(NotFound, match="'gpt-5' does not exist; there are: judge, large") as refused:
        find_policy("gpt-5", [serving("judge", "large")], {"judge"})
    assert refused.value.param == "model"


def test_strictly_a_name_that_nobody_goes_by_is_refused_where_the_engines_say_theirs() -> None:
    members = [serving("", "base"), serving("judge", "large")]
    for model, policy in [("base", ""), ("judge", "judge"), ("large", "judge"), ("", "")]:
        assert find_policy(model, members, {"", "judge"}, strict=True) == policy
    assert find_policy("small", members, {"", "judge"}, {"small": ""}, strict=True) == "", "it was declared"
    with pytest.raises(NotFound, match="'gpt-5' does not exist; there are: base, judge, large") as refused:
        find_policy("gpt-5", members, {"", "judge"}, strict=True)
    assert refused.value.param == "model"
    assert find_policy("gpt-5", [serving("")], {""}, strict=True) == "", "the engine says no names, and refuses it itself"


def test_the_catalogue_names_policies_and_what_their_engines_serve() -> None:
    pool = EnginePool(Settings(engine=["http://a:1", "judge=http://b:1", "off=http://c:1"]))
    pool.replicas = [serving("", "base"), serving("judge", "large"), serving("off", "none", healthy=False)]
    pool.replicas[1].max_model_len = 4096
    assert list(pool.catalogue().items()) == [("judge", 4096), ("base", None), ("large", 4096)]


@pytest.mark.parametrize("turned", [False, True])
def test_a_models_window_is_the_smallest_that_a_call_may_land_on(turned: bool) -> None:
    """Replicas of one policy may differ, one may not say, one lists the model by another name, and one that is down takes no call."""
    pool = EnginePool(Settings(engine=["http://a:1"]))
    members = [serving("", name) for name in ("base", "base", "other", "base", "base")]
    for replica, window in zip(members, (8192, 4096, 2048, None, 1024), strict=True):
        replica.max_model_len = window
    members[4].healthy = False
    pool.replicas = members[::-1] if turned else members
    assert pool.catalogue() == {"base": 2048, "other": 2048}
    assert pool.find_window("base") == pool.find_window("other") == 2048


@pytest.mark.parametrize(
    ("policy", "models", "asked", "sent"),
    [
        ("judge", ("large",), "judge", "large"),
        ("judge", ("large",), "large", "large"),
        ("judge", ("large", "judge"), "judge", "judge"),
        ("judge", ("large",), "other", "large"),
        ("", ("base",), "gpt-5", "base"),
        ("", (), "gpt-5", "gpt-5"),
        ("judge", (), "judge", "judge"),
        ("", ("base",), "", ""),
    ],
)
def test_the_engine_is_asked_by_a_name_of_its_own(policy: str, models: tuple[str, ...], asked: str, sent: str) -> None:
    assert serving(policy, *models).serve(asked).name == sent


@pytest.mark.parametrize("asked", ["tuned", "gpt-5", "base", ""])
def test_an_adapter_is_asked_for_by_the_version_that_serves(asked: str) -> None:
    _, tuned = with_adapters(serving("", "base"), "tuned")
    assert tuned.serve(asked) == Served("tuned@v5.1.00000000", True, 5)
    assert tuned.name_served(asked) == "tuned@v5.1.00000000"


def test_each_adapter_is_a_policy_and_so_is_the_base_model() -> None:
    members = with_adapters(serving("", "base"), "a", "b") + with_adapters(serving("judge", "large"), "tuned")
    policies = {"", "judge", "a", "b", "tuned"}
    for model, policy in [("base", ""), ("a", "a"), ("b", "b"), ("judge", "judge"), ("large", "judge"), ("tuned", "tuned")]:
        assert find_policy(model, members, policies) == policy
    assert set(catalogue(members)) == {"base", "a", "b", "judge", "large", "tuned"}


def test_an_adapter_whose_policy_is_taken_is_noted_for_as_long_as_the_engine_lists_it() -> None:
    base, membership = serving("", "base"), Membership(["http://a:1", "judge=http://b:1"], None, resolve_with_system)
    for listed, noted in (("judge", True), ("a", False), ("judge", True)):
        base.cards = {listed: f"/adapters/{listed}"}
        follow_adapters(base, [base], membership)
        said = [note for note in base.notes.values() if "lists the adapter 'judge', which gets no calls" in note]
        assert len(said) == noted


def test_a_name_that_nobody_goes_by_means_the_only_adapter_of_the_default_engines_else_their_base_model() -> None:
    one, two = with_adapters(serving("", "base"), "a"), with_adapters(serving("", "base"), "a", "b")
    of_judge = with_adapters(serving("judge", "large"), "tuned")
    for model in ("gpt-5", ""):
        assert find_policy(model, one + of_judge, {"", "a", "judge", "tuned"}) == "a"
        assert find_policy(model, two, {"", "a", "b"}) == ""
        assert find_policy(model, [serving("", "base"), *of_judge], {"", "judge", "tuned"}) == ""
    assert find_policy("gpt-5", one, {"", "a"}, {"gpt-5": ""}) == "", "it was declared"
    assert find_policy("base", one, {"", "a"}) == ""
    with pytest.raises(NotFound, match="there are: a, base"):
        find_policy("gpt-5", one, {"", "a"}, strict=True)


def test_a_frozen_model_is_one_by_any_name_of_the_call() -> None:
    judge = serving("judge", "large")
    assert (
        is_frozen(judge, "judge", ["judge"]) and is_frozen(judge, "large", ["judge"]) and is_frozen(judge, "judge", ["large"])
    )
    assert not is_frozen(judge, "judge", ["base"]) and not is_frozen(serving("", "base"), "base", ["judge"])
