"""Keys, tokens and where a request may carry them."""

from __future__ import annotations

import pytest
from pydantic import SecretStr
from starlette.datastructures import Headers

from proxy.auth import (
    SESSION_ID,
    Role,
    check_role,
    credential,
    key_opens,
    mint_key,
    mint_token,
    named_session,
    role_of,
    session_of_key,
)
from proxy.errors import Forbidden, Unauthorized
from proxy.settings import Settings

SETTINGS = Settings(admin_token=SecretStr("the-admin"), trainer_token=SecretStr("the-trainer"))


@pytest.mark.parametrize("session_id", ["a", "task-1.try_2", "a-b-c", "-", "...", "x" * 128])
def test_a_key_names_its_session_and_opens_nothing_else(session_id: str) -> None:
    key, key_hash = mint_key(session_id)
    assert session_of_key(key) == session_id
    assert key_opens(key, key_hash)
    other, other_hash = mint_key(session_id)
    assert key != other
    assert not key_opens(key, other_hash)


@pytest.mark.parametrize("key", ["", "sk-123", "vb-", "vb-12-s", "vb-" + "g" * 40 + "-s", "vb-" + "a" * 40 + "-", "x" * 9999])
def test_what_is_no_session_key_names_no_session(key: str) -> None:
    assert session_of_key(key) is None


@pytest.mark.parametrize("session_id", ["", ".", "..", "a/b", "a b", "ä", "a\n", "x" * 129])
def test_a_session_id_that_cannot_stand_in_a_path_is_refused(session_id: str) -> None:
    assert not SESSION_ID.match(session_id)


def test_a_request_carries_its_secret_in_any_vendors_place() -> None:
    for headers, query in (
        ({"Authorization": "Bearer k"}, {}),
        ({"authorization": "bearer  k "}, {}),
        ({"X-Api-Key": "k"}, {}),
        ({"x-goog-api-key": "k"}, {}),
        ({}, {"key": "k"}),
        ({"authorization": "Basic zzz", "x-api-key": "k"}, {"key": "other"}),
    ):
        assert credential(Headers(headers), query) == "k"
    assert credential(Headers({"authorization": "Bearer "}), {}) is None
    assert credential(Headers({}), {}) is None


def test_path_and_key_must_name_the_same_session() -> None:
    key, _ = mint_key("s1")
    assert named_session(None, key) == "s1"
    assert named_session("s1", key) == "s1"
    for path, secret in (("s2", key), ("s1", None), (None, None), ("s1", "sk-unknown")):
        with pytest.raises(Unauthorized):
            named_session(path, secret)


def test_the_admin_may_do_all_that_the_trainer_may_and_not_the_reverse() -> None:
    assert check_role("the-admin", Role.ADMIN, SETTINGS) is Role.ADMIN
    assert check_role("the-admin", Role.TRAINER, SETTINGS) is Role.ADMIN
    assert check_role("the-trainer", Role.TRAINER, SETTINGS) is Role.TRAINER
    with pytest.raises(Forbidden, match="admin token"):
        check_role("the-trainer", Role.ADMIN, SETTINGS)


def test_a_session_key_and_an_unknown_token_open_no_control_route() -> None:
    key, _ = mint_key("s1")
    for role in Role:
        with pytest.raises(Forbidden, match="session key"):
            check_role(key, role, SETTINGS)
        for secret in (None, "", "the-admi", "the-adminn", "ünknown"):
            with pytest.raises(Unauthorized):
                check_role(secret, role, SETTINGS)


def test_a_token_that_is_not_set_is_not_opened_by_an_empty_one() -> None:
    assert role_of("", Settings()) is None
    assert role_of("", Settings(admin_token=SecretStr(""))) is None


def test_minted_tokens_are_long_and_differ() -> None:
    assert len(mint_token()) >= 40
    assert mint_token() != mint_token()
