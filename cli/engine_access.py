"""An engine asked directly, with the key and the certificates of the service: whether it answers, and which models it lists."""

from __future__ import annotations

import os
import ssl
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path

import httpx

from cli.checks import EXTRAS, Check, State
from cli.options import find_missing
from cli.refusal import CommandError

PROBE_SECONDS = 10.0
V1 = "/v1"
NOT_VLLM = "not vLLM"
SHOWN_MODELS = 20
SHOWN_CHARACTERS = 300
KEY_FILE = "VERBATIM_ENGINE_API_KEY_FILE"
_TLS_FILES = ("CA_FILE", "CLIENT_CERT")
START = "start it, or correct the URL: vllm serve MODEL --enable-scale-out (before vLLM 0.30 without that flag)"


def open_engine_client(seconds: float) -> httpx.Client:
    """A client that shows the engines the service's key and trusts whom the service trusts, by the same variables. Raises
    `CommandError`."""
    from proxy.engine.wire.tls import build_client_tls

    files = {name: Path(value) for name in _TLS_FILES if (value := os.environ.get(f"VERBATIM_ENGINE_{name}"))}
    try:
        key = _read_key()
        tls = build_client_tls(files.get("CA_FILE"), files.get("CLIENT_CERT"))
    except ValueError as error:
        raise CommandError(str(error), exit_code=2) from error
    return httpx.Client(
        timeout=httpx.Timeout(seconds, connect=5.0),
        headers={"Authorization": f"Bearer {key}"} if key else {},
        verify=tls or ssl.create_default_context(),
        # The service uses no proxy of the environment.
        trust_env=False,
    )


def _read_key() -> str:
    """Empty if there is none. Raises ValueError, which names what is wrong."""
    from proxy.auth import check_token, token_in

    path = Path(given) if (given := os.environ.get(KEY_FILE)) else None
    key = os.environ.get("VERBATIM_ENGINE_API_KEY", "")
    try:
        if path is not None:
            return token_in(path)
        check_token(key)
        return key
    except ValueError as error:
        raise ValueError(f"{'VERBATIM_ENGINE_API_KEY' if path is None else f'{KEY_FILE} {path}'}: {error}") from error


def check_engine(engine: str, client: httpx.Client, wanted: Collection[str | None] = ()) -> Check:
    """`engine` is what --engine names; `wanted` the models that are to be asked for, None: the first that it lists. `note`: it does not
    answer yet."""
    name, separator, rest = engine.partition("=")
    url = rest if separator and "://" not in name else engine
    # As the service takes it, but in the base install, too.
    url = url.strip().rstrip("/").removesuffix("/v1").rstrip("/")
    about = f"engine {url.rpartition('@')[2]}"
    if "@" in url.split("://")[-1].partition("/")[0]:
        advice = f"name it without, and pass a key with {KEY_FILE}"
        return Check(about, "fix", "its URL holds a password, which logs would show", advice)
    if url.startswith("dns://"):
        return Check(about, "note", "the addresses of its name are not asked")
    path = V1
    try:
        path, answer = _find_routes(client, url)
        if answer.is_success:
            models = [str(model["id"]) for model in answer.json()["data"]]
            check = _check_models(about, models, wanted, _find_version(client, url))
            return check if path == V1 else replace(check, found=f"{check.found}; calls go to {url}{path}/chat/completions")
        return _explain_refusal(about, client, url, path, answer)
    except httpx.ConnectError as error:
        if _is_about_trust(error):
            advice = "name its authority in VERBATIM_ENGINE_CA_FILE"
            return Check(about, "fix", f"its certificate is not trusted: {error}", advice)
        return Check(about, "note", f"it does not answer yet: {error}", START)
    except httpx.HTTPError as error:
        return Check(about, "note", f"it does not answer yet: {error or type(error).__name__}", START)
    except (httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
        return Check(about, "fix", f"GET {url}{path}/models does not list models: {error}", START)


def _find_routes(client: httpx.Client, url: str) -> tuple[str, httpx.Response]:
    """Where the OpenAI routes stand under the URL, and the answer to GET models there. The service looks likewise (`Probe.read_models`)."""
    answer = client.get(f"{url}{V1}/models")
    if _lists_models(answer) or answer.is_server_error or _lacks(client, f"{url}/chat/completions"):
        return V1, answer
    at_base = client.get(f"{url}/models")
    if _lists_models(at_base) or _lacks(client, f"{url}{V1}/chat/completions"):
        return "", at_base
    return V1, answer


def _lists_models(answer: httpx.Response) -> bool:
    try:
        listed = answer.json() if answer.is_success else None
    except ValueError:
        return False
    return isinstance(listed, dict) and isinstance(listed.get("data"), list)


def _lacks(client: httpx.Client, url: str) -> bool:
    return client.post(url, json={}).status_code in (404, 405)


def _check_models(about: str, models: list[str], wanted: Collection[str | None], version: str) -> Check:
    listed = ", ".join(models[:SHOWN_MODELS]) + (
        f" and {len(models) - SHOWN_MODELS} more" if len(models) > SHOWN_MODELS else ""
    )
    # An engine of one model is asked for that under any name, and on vLLM a service may know others: adapters, policies.
    state: State = "fix" if version == NOT_VLLM else "note"
    for model in wanted if len(models) > 1 else ():
        if model is None:
            return Check(about, state, f"a task names no model, and it lists {len(models)}", f"pass --model: {listed}")
        if model not in models:
            return Check(about, state, f"it does not list the model {model!r}", f"it lists {listed}")
    return Check(about, "ok", f"serves {listed}; {version}" if models else "lists no models")


def _find_version(client: httpx.Client, url: str) -> str:
    answer = client.get(f"{url}/version")
    try:
        return f"vLLM {answer.json()['version']}" if answer.is_success else NOT_VLLM
    except (ValueError, KeyError, TypeError):
        return NOT_VLLM


def _explain_refusal(about: str, client: httpx.Client, url: str, path: str, answer: httpx.Response) -> Check:
    """Why it lists no models, in its own words."""
    said = f"HTTP {answer.status_code}: {_words(client, answer)}"
    if answer.status_code in (401, 403):
        has_key = "authorization" in client.headers
        advice = f"correct the key in VERBATIM_ENGINE_API_KEY or {KEY_FILE}"
        return Check(about, "fix", f"it refuses {'the key' if has_key else 'calls without a key'}: {said}", advice)
    if answer.status_code == httpx.codes.TOO_MANY_REQUESTS:
        return Check(about, "note", f"it is at its rate limit: {said}", "calls wait for as long as it asks")
    if answer.is_server_error:
        return Check(about, "note", f"it does not answer yet: {said}", START)
    if answer.status_code in (404, 405):
        # A server may have calls and no list.
        if path != V1 or not _lacks(client, f"{url}{V1}/chat/completions"):
            return Check(about, "ok", "lists no models")
        advice = (
            f"correct the URL: calls go to {url}/v1/chat/completions or {url}/chat/completions; it may be given with /v1 at its end or "
            "without"
        )
        return Check(about, "fix", f"it has no /v1/models and no /v1/chat/completions: {said}", advice)
    return Check(about, "fix", f"GET {url}{path}/models was refused: {said}", "correct the URL or the key")


def _words(client: httpx.Client, answer: httpx.Response) -> str:
    """The server's message, without the key, which some repeat."""
    if find_missing(EXTRAS["proxy"]):
        message = answer.text
    else:
        from proxy.engine.wire.refusals import read_message

        message = read_message(answer.content)[0]
    key = client.headers.get("authorization", "").removeprefix("Bearer ")
    return (message.replace(key, "…") if key else message)[:SHOWN_CHARACTERS] or answer.reason_phrase


def _is_about_trust(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, ssl.SSLCertVerificationError):
            return True
        error = error.__cause__ or error.__context__
    return False


def hide_key(environment: dict[str, str]) -> dict[str, str]:
    """The environment without the engines' key: for what calls no engine."""
    return {name: value for name, value in environment.items() if not name.startswith("VERBATIM_ENGINE_API_KEY")}
