"""Nothing that opens anything is written anywhere: not into logs, metrics, errors, or what the start prints."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.proxy.test_security import BODIES, HARNESS, carriers
from tests.support.engine.scripted_engine import Fail, Say, ScriptedEngine
from tests.support.engine.scripted_fixtures import fresh_engine
from tests.support.service import plain_http
from tests.support.service.verbatim_process import Serving, verbatim, wait_until

__all__ = ["fresh_engine"]

NOWHERE = ("--engine", "http://127.0.0.1:9")
ADMIN, OLD_ADMIN, TRAINER, FROM_FILE = (f"{name}-0123456789abcdef" for name in ("chief", "former", "coach", "filed"))
ENGINE_KEY = "engine-key-0123456789abcdef"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return tmp_path / "data"


def harness_calls(service: Serving, session: dict[str, Any], key: str | None) -> list[httpx.Response]:
    """Every endpoint of the harness side and some that are not there, with the key in every place where it can stand."""
    answers = []
    paths = [(method, path, BODIES[dialect]) for (method, dialect, _), path in HARNESS.items()]
    paths += [("POST", "/v1/none", {}), ("POST", "/v1/messages", {"model": 7}), ("PUT", "/v1/chat/completions", {})]
    paths += [("POST", "/v1beta/models/policy:streamGenerateContent", BODIES["gemini"])]
    for method, path, body in paths:
        for headers, query in carriers(key):
            url = f"{service.url}/s/{session['session_id']}{path}"
            answers.append(plain_http.request(method, url, headers=headers, params=query, json=body))
    return answers


def test_no_secret_is_written_anywhere(data: Path, engine: ScriptedEngine, tmp_path: Path) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"{OLD_ADMIN}\n{FROM_FILE}\n")
    with Serving(
        *("--engine", engine.url, "--log-level", "debug"),
        data_dir=data,
        VERBATIM_ADMIN_TOKEN=ADMIN,
        VERBATIM_ADMIN_TOKEN_FILE=str(file),
        VERBATIM_TRAINER_TOKEN=TRAINER,
        VERBATIM_ENGINE_API_KEY=ENGINE_KEY,
    ) as service:
        wait_until(lambda: service.request("GET", "/readyz", ADMIN).status_code == 200, 60, "ready")
        session = service.request("POST", "/sessions", ADMIN, json={}).json()
        key = session["api_key"]
        forged = f"vb-{'d' * 40}-{session['session_id']}"
        answers = [answer for secret in (key, forged, None) for answer in harness_calls(service, session, secret)]
        engine.script = lambda generation, index: Say("hello", break_after=1)
        answers += harness_calls(service, session, key)
        engine.script = lambda generation, index: Fail(500, "no")
        answers += harness_calls(service, session, key)
        assert service.request(
            "POST", f"/sessions/{session['session_id']}/close", OLD_ADMIN, json={"status": "failed"}
        ).is_success
        answers += harness_calls(service, session, key)
        for secret in (key, forged, ADMIN, OLD_ADMIN, FROM_FILE, TRAINER, "nobody's"):
            for method, path in (("GET", "/sessions"), ("GET", "/weights"), ("POST", "/batches/lease"), ("GET", "/none")):
                for headers, query in carriers(secret):
                    answers.append(plain_http.request(method, service.url + path, headers=headers, params=query))
        # A harness that puts its key where none belongs.
        answers += [plain_http.get(f"{service.url}/s/{session['session_id']}/v1/none/x?key={key}")]
        plain_http.get(f"{service.url}/s/{key}/v1/none")
        for path in (
            "/metrics",
            "/readyz",
            "/openapi.json",
            f"/sessions/{session['session_id']}/calls",
            "/weights",
            "/sessions",
        ):
            answers.append(service.request("GET", path, ADMIN))
        assert {answer.status_code for answer in answers} >= {200, 204, 400, 401, 403, 404, 405, 409}
        assert service.stop() == 0
    secrets = (key.removesuffix(session["session_id"]), forged, ADMIN, OLD_ADMIN, FROM_FILE, TRAINER, ENGINE_KEY)
    assert "is not an endpoint" in service.stderr and "vb-..." in service.stderr
    for secret in secrets:
        assert secret not in service.stdout + service.stderr
        for answer in answers:
            assert secret not in answer.text + str(answer.headers), answer.request.url
    assert all(exchange.headers.get("authorization") == f"Bearer {ENGINE_KEY}" for exchange in engine.received)
    assert key.encode() not in b"".join(path.read_bytes() for path in data.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("flags", "variables", "secret"),
    [
        (["--redis", "redis://:hidden-word@127.0.0.1:1/0"], {}, "hidden-word"),
        (["--redis", "redis+cluster://me:hidden-word@127.0.0.1:1"], {}, "hidden-word"),
        (["--redis", "nonsense://me:hidden-word@127.0.0.1:1"], {}, "hidden-word"),
        (["--redis", "redis://me:hidden-word@127.0.0.1:none"], {}, "hidden-word"),
        ([], {"VERBATIM_ADMIN_TOKEN": "hidden word"}, "hidden"),
        ([], {"VERBATIM_TRAINER_TOKEN": "hid den"}, "hid"),
        ([], {"VERBATIM_ENGINE_API_KEY": "hid den"}, "hid"),
        (["--engine", "http://me:hidden-word@127.0.0.1:9"], {}, "hidden-word"),
    ],
)
def test_a_refusal_to_start_names_no_secret(data: Path, flags: list[str], variables: dict[str, Any], secret: str) -> None:
    variables["VERBATIM_REDIS_RETRY_SECONDS"] = "0.5"
    ended = verbatim("serve", *NOWHERE, *flags, "--port", "0", "--data-dir", str(data), **variables)
    assert ended.returncode in (1, 2)
    assert "Traceback" not in ended.stderr and ended.stderr.strip()
    assert secret not in ended.stdout + ended.stderr


def test_tokens_are_exchanged_without_a_restart(data: Path, tmp_path: Path) -> None:
    file = tmp_path / "trainer"
    file.write_text("the-old-token-of-16\n")
    with Serving(
        *NOWHERE, "--workers", "2", data_dir=data, VERBATIM_TRAINER_TOKEN="", VERBATIM_TRAINER_TOKEN_FILE=str(file)
    ) as service:
        assert "trainer token: from VERBATIM_TRAINER_TOKEN_FILE" in service.stdout

        def status(token: str) -> set[int]:
            """Of several requests, so that every process was asked."""
            headers = {"Authorization": f"Bearer {token}"}
            return {plain_http.get(f"{service.url}/weights", headers=headers).status_code for _ in range(20)}

        def opens(expected: int) -> bool:
            return status("the-old-token-of-16") == {expected}

        assert status("the-old-token-of-16") == {200} and status("the-new-token-of-16") == {401}
        for text, old in (("the-old-token-of-16\nthe-new-token-of-16", 200), ("the-new-token-of-16", 401)):
            (tmp_path / "next").write_text(text)
            os.replace(tmp_path / "next", file)
            wait_until(lambda: status("the-new-token-of-16") == {200}, 120, "the new token opens")
            wait_until(partial(opens, old), 120, "the old token is as the file says")


def test_a_token_that_could_be_guessed_is_warned_of(data: Path) -> None:
    with Serving(*NOWHERE, data_dir=data, VERBATIM_ADMIN_TOKEN="short", VERBATIM_TRAINER_TOKEN="short") as service:
        assert "an admin token has fewer than 16 characters" in service.stderr
        assert "an admin token is also a trainer token" in service.stderr
        assert "short" not in service.stderr


def test_open_mode_needs_no_token_and_says_so(data: Path) -> None:
    with Serving(*NOWHERE, "--open", data_dir=data, VERBATIM_ADMIN_TOKEN="", VERBATIM_TRAINER_TOKEN="") as service:
        assert service.stdout.count("open to every program on this machine") == 2
        assert "Bearer" not in service.stdout
        made = plain_http.post(f"{service.url}/sessions", json={"session_id": "first"})
        assert made.status_code == 201
        assert plain_http.get(f"{service.url}/s/first/v1/models").status_code == 200
        foreign = plain_http.get(f"{service.url}/sessions", headers={"Origin": "https://evil.example"})
        assert foreign.status_code == 403


@pytest.mark.parametrize(("flags", "variables"), [(["--open"], {}), ([], {"VERBATIM_OPEN": "true"})])
def test_open_mode_is_refused_where_other_machines_could_reach_it(
    data: Path, flags: list[str], variables: dict[str, Any]
) -> None:
    ended = verbatim("serve", *NOWHERE, *flags, "--host", "0.0.0.0", "--port", "0", "--data-dir", str(data), **variables)
    assert ended.returncode == 2
    assert "--open" in ended.stderr and "0.0.0.0" in ended.stderr and "without a token" in ended.stderr
    assert not data.exists()
