"""Keys, tokens and where a request may carry them."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from pydantic import SecretStr, ValidationError
from starlette.datastructures import Headers

from contract.sessions import SESSION_ID
from proxy.auth import (
    CHECK_SECONDS,
    Role,
    Tokens,
    check_local,
    credential,
    is_loopback,
    key_opens,
    mint_key,
    mint_token,
    named_session,
    session_of_key,
)
from proxy.errors import Forbidden, Unauthorized
from proxy.settings import GivenToken, Settings, list_variables


def one(token: str) -> GivenToken:
    return GivenToken(token=SecretStr(token))


TOKENS = Tokens(Settings(admin_token=one("the-admin"), trainer_token=one("the-trainer"), node_token=one("the-node")).tokens)


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


def test_an_open_service_takes_a_path_for_a_key_and_still_no_two_sessions() -> None:
    key, _ = mint_key("s1")
    assert named_session("s1", None, keyless=True) == named_session("s1", "sk-any", keyless=True) == "s1"
    for path, secret in (("s2", key), (None, None), (None, "sk-any")):
        with pytest.raises(Unauthorized):
            named_session(path, secret, keyless=True)


def test_the_admin_may_do_all_that_the_trainer_may_and_not_the_reverse() -> None:
    assert TOKENS.check("the-admin", Role.ADMIN) is Role.ADMIN
    assert TOKENS.check("the-admin", Role.TRAINER) is Role.ADMIN
    assert TOKENS.check("the-trainer", Role.TRAINER) is Role.TRAINER
    with pytest.raises(Forbidden, match="admin token"):
        TOKENS.check("the-trainer", Role.ADMIN)


def test_a_nodes_token_opens_what_nodes_need_and_neither_a_trainers_nor_the_admins() -> None:
    assert TOKENS.check("the-node", Role.NODE) is Role.NODE
    assert TOKENS.check("the-admin", Role.NODE) is Role.ADMIN
    for secret, role in (("the-node", Role.ADMIN), ("the-node", Role.TRAINER), ("the-trainer", Role.NODE)):
        with pytest.raises(Forbidden, match=f"the {role} token"):
            TOKENS.check(secret, role)


def test_a_token_of_two_roles_opens_what_either_does() -> None:
    both = Tokens(Settings(trainer_token=one("x"), node_token=one("x")).tokens)
    for role in (Role.TRAINER, Role.NODE):
        assert both.check("x", role) is role
    with pytest.raises(Forbidden, match="admin token"):
        both.check("x", Role.ADMIN)


def test_a_session_key_and_an_unknown_token_open_no_control_route() -> None:
    key, _ = mint_key("s1")
    for role in Role:
        with pytest.raises(Forbidden, match="session key"):
            TOKENS.check(key, role)
        for secret in (None, "", "the-admi", "the-adminn", "ünknown"):
            with pytest.raises(Unauthorized):
                TOKENS.check(secret, role)


def test_a_token_that_is_not_set_is_not_opened_by_an_empty_one() -> None:
    assert Tokens(Settings().tokens).roles_of("") == set()
    assert Tokens(Settings(admin_token=one("")).tokens).roles_of("") == set()


def test_minted_tokens_are_long_and_differ() -> None:
    assert len(mint_token()) >= 40
    assert mint_token() != mint_token()


def test_several_tokens_of_a_role_are_valid_at_once(tmp_path: Path) -> None:
    (tmp_path / "more").write_text("old\nolder\n")
    admin = GivenToken(token=SecretStr("new"), file=tmp_path / "more")
    tokens = Tokens(Settings(admin_token=admin, trainer_token=one("t")).tokens)
    assert [tokens.roles_of(secret) for secret in ("new", "old", "older")] == [{Role.ADMIN}] * 3
    assert tokens.roles_of("t") == {Role.TRAINER}
    assert admin.read() == ["new", "old", "older"]


@pytest.mark.parametrize("name", [*(f"{role}_token" for role in Role), "engine_api_key"])
def test_each_token_comes_by_itself_or_in_a_file_by_variables_of_one_form(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in-a-file\n")
    variable, variable_of_file = list_variables(Settings)[name]
    assert (variable, variable_of_file) == (f"VERBATIM_{name.upper()}", f"VERBATIM_{name.upper()}_FILE")
    monkeypatch.setenv(variable, "alone")
    assert getattr(Settings(), name).read() == ["alone"]
    monkeypatch.setenv(variable, "")
    monkeypatch.setenv(variable_of_file, str(tmp_path / "file"))
    assert getattr(Settings(), name).read() == ["in-a-file"]
    monkeypatch.setenv(variable_of_file, "")
    assert getattr(Settings(), name).read() == []


def test_the_engines_key_is_one_key(tmp_path: Path) -> None:
    (tmp_path / "two").write_text("a\nb\n")
    with pytest.raises(ValidationError, match="it does not hold one key"):
        Settings(engine_api_key=GivenToken(file=tmp_path / "two"))
    (tmp_path / "two").write_text("a\n")
    with pytest.raises(ValidationError, match="set one of the two"):
        Settings(engine_api_key=GivenToken(token=SecretStr("b"), file=tmp_path / "two"))


def test_a_token_of_both_roles_is_the_admins() -> None:
    tokens = Tokens(Settings(admin_token=one("x"), trainer_token=one("x")).tokens)
    assert tokens.check("x", Role.TRAINER) is tokens.check("x", Role.ADMIN) is Role.ADMIN


def test_a_token_file_is_read_again_when_it_was_replaced(tmp_path: Path) -> None:
    """As a mounted secret is: a link that points to another folder from one moment to the next."""
    now = 0.0
    for name, text in (("first", "# comment\nold\n"), ("second", "new\n\n old \n"), ("third", "new")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "token").write_text(text)
    current = tmp_path / "current"
    current.symlink_to("first")
    tokens = Tokens(Settings(admin_token=GivenToken(file=current / "token")).tokens, clock=lambda: now)
    assert (tokens.roles_of("old"), tokens.roles_of("new")) == ({Role.ADMIN}, set())
    for name, old in (("second", {Role.ADMIN}), ("third", set[Role]())):
        (tmp_path / "next").symlink_to(name)
        os.replace(tmp_path / "next", current)
        now += CHECK_SECONDS
        assert (tokens.roles_of("old"), tokens.roles_of("new")) == (old, {Role.ADMIN})


def test_a_token_file_that_is_gone_leaves_the_tokens_and_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    file = tmp_path / "token"
    file.write_text("the-secret")
    tokens = Tokens(Settings(trainer_token=GivenToken(file=file)).tokens, clock=lambda: now)
    assert tokens.roles_of("the-secret") == {Role.TRAINER}
    file.unlink()
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            now += CHECK_SECONDS
            assert tokens.roles_of("the-secret") == {Role.TRAINER}
    assert len(caplog.records) == 1 and str(file) in caplog.text and "the-secret" not in caplog.text


def test_a_token_file_that_is_empty_opens_nothing_any_more(tmp_path: Path) -> None:
    now = 0.0
    file = tmp_path / "token"
    file.write_text("secret")
    tokens = Tokens(Settings(admin_token=GivenToken(file=file)).tokens, clock=lambda: now)
    assert tokens.roles_of("secret") == {Role.ADMIN}
    file.write_text("")
    now += CHECK_SECONDS
    assert tokens.roles_of("secret") == tokens.roles_of("") == set()


@pytest.mark.parametrize("text", ["", "# only a comment\n", "two words", "tök"])
def test_a_token_file_without_a_usable_token_is_refused_at_the_start(tmp_path: Path, text: str) -> None:
    file = tmp_path / "token"
    file.write_text(text)
    with pytest.raises(ValidationError, match="token"):
        Settings(admin_token=GivenToken(file=file))
    with pytest.raises(ValidationError, match="cannot be read"):
        Settings(trainer_token=GivenToken(file=tmp_path / "nowhere"))


@pytest.mark.parametrize("token", ["two words", "tök", "line\nbreak"])
def test_a_token_that_no_header_carries_is_refused(token: str) -> None:
    for name in ("admin_token", "trainer_token"):
        with pytest.raises(ValidationError, match="ASCII"):
            Settings(**{name: token})  # type: ignore[arg-type]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_a_service_on_loopback_may_be_open(host: str) -> None:
    assert is_loopback(host)
    assert Settings(host=host, open=True).open


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.1", "example.org", "localhost.example.org", "", "127.0.0.1.nip.io"])
def test_a_service_that_other_machines_reach_is_not_open(host: str) -> None:
    assert not is_loopback(host)
    with pytest.raises(ValidationError, match="without a token"):
        Settings(host=host, open=True)


def test_an_open_service_answers_programs_and_no_web_pages() -> None:
    for host in ("127.0.0.1:8700", "localhost:8700", "[::1]:8700", "localhost"):
        check_local({"host": host})
        check_local({"host": host, "origin": f"http://{host}"})
        others = ("http://localhost:3000", "http://127.0.0.1:8701", "http://[::1]:1")
        for origin in (*others, "https://evil.example", "null", "", "http://localhost.evil.example", "http://[broken"):
            with pytest.raises(Forbidden, match="web pages"):
                check_local({"host": host, "origin": origin})
    # The same page under another of the machine's names.
    check_local({"host": "127.0.0.1:8700", "origin": "http://localhost:8700"})
    for host in ("rebound.example:8700", "", "10.0.0.1:8700"):
        with pytest.raises(Forbidden):
            check_local({"host": host})
