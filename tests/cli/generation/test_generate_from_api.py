"""`verbatim generate` with the model of an API vendor: a key, https, rate limits, fields that are refused, no token ids."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from datasets import load_dataset

from cli.engine_access import check_engine, open_engine_client
from cli.refusal import CommandError
from tests.cli.generation.test_generate import SECONDS, lines, task, variables, written
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.strict_server import KEY, StrictServer
from tests.support.service.authority import Authority
from tests.support.service.verbatim_process import verbatim
from tests.support.sessions.conversations import TOOLS

MODEL = "large"
AGENT = f"""{sys.executable} -S - <<'PYTHON'
import http.client, json, os, urllib.parse
url = urllib.parse.urlsplit(os.environ["OPENAI_BASE_URL"])
headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}}
messages = [{{"role": "user", "content": "what is alpha?"}}]
def ask(**more):
    connection = http.client.HTTPConnection(url.netloc)
    body = {{"model": "{MODEL}", "messages": messages, "tools": json.loads('''{json.dumps(TOOLS)}'''), **more}}
    connection.request("POST", url.path + "/chat/completions", json.dumps(body).encode(), headers)
    answer = connection.getresponse()
    assert answer.status == 200, answer.read()
    return answer
message = json.load(ask(temperature=0.5))["choices"][0]["message"]
messages += [message, {{"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "hello world"}}]
events = [line[6:] for line in ask(stream=True).read().decode().splitlines() if line.startswith("data: {{")]
text = "".join((json.loads(event)["choices"] or [{{"delta": {{}}}}])[0]["delta"].get("content") or "" for event in events)
open("said.txt", "w").write(text)
PYTHON
"""
"""A harness: it calls a tool once, and streams what the model says of the result."""


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "ca", "ours")


@pytest.fixture
def vendor(authority: Authority) -> Iterator[StrictServer]:
    server = StrictServer(refuses=("logprobs", "top_logprobs"), models=("small", MODEL))
    server.tls = authority.issue("vendor")
    with server:
        yield server


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    (tmp_path / "key").write_text(f"{KEY}\n")
    return tmp_path / "key"


def generate(tmp_path: Path, base: str, *args: str, **more: str) -> subprocess.CompletedProcess[str]:
    given = ("--engine", base, "--harness", "shell", "--out", str(tmp_path / "out"), *args)
    given += (written(tmp_path / "tasks.jsonl", task("a", instruction=AGENT)),)
    return verbatim("generate", *given, timeout_seconds=SECONDS, **variables(tmp_path) | {"VERBATIM_ENGINE_API": "auto"} | more)


def test_what_an_api_model_did_well_is_written_as_conversations(
    vendor: StrictServer, authority: Authority, key_file: Path, tmp_path: Path
) -> None:
    """Every call was refused for `return_token_ids`; and of an engine without ids nothing was written."""
    looked_up = vendor.family.speak(calls=[("lookup", {"key": "alpha"})])
    vendor.busy("0").say(looked_up, "goodbye", looked_up, "hello world")
    given = ("--model", MODEL, "--max-samples", "3", "--at-once", "1")
    files = {"VERBATIM_ENGINE_API_KEY_FILE": str(key_file), "VERBATIM_ENGINE_CA_FILE": str(authority.file)}
    done = generate(tmp_path, f"{vendor.url}/v1", *given, **files)
    assert done.returncode == 0, done.stderr
    assert "serves small, large; not vLLM" in done.stderr and "1 conversations in " in done.stderr
    out = tmp_path / "out"
    (conversation,) = lines(out / "chat.jsonl")
    assert [message["role"] for message in conversation["messages"]] == ["user", "assistant", "tool", "assistant"]
    assert conversation["messages"][1]["tool_calls"][0]["function"] == {"name": "lookup", "arguments": {"key": "alpha"}}
    assert conversation["messages"][-1]["content"] == "hello world" and conversation["tools"] == TOOLS
    assert (conversation["reward"], conversation["truncated"], conversation["model"]) == (1.0, False, MODEL)
    kept = [attempt["session_id"] for attempt in lines(out / "rollouts.jsonl") if attempt["kept"]]
    assert kept == [conversation["session_id"]] and conversation["trajectory_id"] is None
    (loaded,) = load_dataset(str(out), split="train", cache_dir=str(tmp_path / "cache"))
    assert loaded["messages"] == conversation["messages"]
    assert "trajectories-*" not in (out / "README.md").read_text()
    written_files = [path for path in out.rglob("*") if path.is_file()]
    assert not [path for path in written_files if KEY.encode() in path.read_bytes()] and KEY not in done.stderr + done.stdout
    taken = [body for body in vendor.bodies() if "return_token_ids" not in body]
    assert {body["model"] for body in taken} == {MODEL} and not any(
        {"logprobs", "top_logprobs"} & body.keys() for body in taken
    )


def test_it_ends_at_once_where_the_key_is_wrong(vendor: StrictServer, authority: Authority, tmp_path: Path) -> None:
    """It waited five minutes for an engine."""
    wrong = "sk-wrong-0123456789"
    more = {"VERBATIM_ENGINE_CA_FILE": str(authority.file), "VERBATIM_ENGINE_API_KEY": wrong}
    done = generate(tmp_path, vendor.url, "--model", MODEL, **more)
    assert done.returncode == 1 and wrong not in done.stderr
    assert "it refuses the key: HTTP 401: Incorrect API key provided: Bearer …." in done.stderr
    assert not (tmp_path / "out" / "rollouts.jsonl").exists()


def check(engine: ScriptedEngine | str, *wanted: str | None, key: str = KEY, **more: str) -> tuple[str, str]:
    """State, and what was found with the advice."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({"VERBATIM_ENGINE_API_KEY": key} | more).items():
            patch.setenv(name, value)
        with open_engine_client(60.0) as client:
            found = check_engine(engine if isinstance(engine, str) else engine.url, client, wanted)
    return found.state, f"{found.found}; {found.advice}"


def test_the_check_of_an_engine_says_what_it_answered(vendor: StrictServer, authority: Authority) -> None:
    trust = {"VERBATIM_ENGINE_CA_FILE": str(authority.file)}
    assert check(vendor, MODEL, **trust) == check(f"{vendor.url}/v1/", **trust) == ("ok", "serves small, large; not vLLM; ")
    state, found = check(vendor, "larger", **trust)
    assert state == "fix" and found.startswith("it does not list the model 'larger'; it lists small, large")
    state, found = check(vendor, None, **trust)
    assert state == "fix" and "a task names no model, and it lists 2" in found
    state, found = check(vendor, MODEL)
    assert state == "fix" and "its certificate is not trusted" in found and "VERBATIM_ENGINE_CA_FILE" in found
    state, found = check(f"{vendor.url}/api/v2", **trust)
    assert state == "fix" and "it has no /v1/models and no /v1/chat/completions: HTTP 404: Not Found" in found
    assert "it may be given with /v1 at its end or without" in found
    state, found = check(vendor, key="", **trust)
    assert state == "fix" and "it refuses calls without a key: HTTP 401: Incorrect API key provided" in found


def test_the_check_only_notes_a_model_that_a_vllm_of_several_does_not_list() -> None:
    """A service may know the name: of an adapter that is loaded later, of a policy, or as another word for the only base model."""
    with ScriptedEngine("qwen3") as engine:
        engine.version, engine.weights.adapters = "0.32.0", {"tuned": "/adapters/tuned"}
        assert check(engine, "policy")[0] == "ok"
        state, found = check(engine, None)
        assert state == "note" and "a task names no model, and it lists 2" in found
        assert check(engine, "later")[0] == "note"


def test_the_check_takes_no_url_with_a_password_and_does_not_repeat_it() -> None:
    state, found = check("http://me:hunter2@127.0.0.1:9/v1")
    assert state == "fix" and "holds a password" in found and "hunter2" not in found


def test_the_key_is_sent_whatever_else_the_environment_says_of_a_service(vendor: StrictServer, authority: Authority) -> None:
    """Settings that are about something else were read with it, and one that was wrong ended the command."""
    trust = {"VERBATIM_ENGINE_CA_FILE": str(authority.file)}
    assert check(vendor, MODEL, VERBATIM_MAX_CALLS="nonsense", VERBATIM_RENDERER="nobody/knows", **trust)[0] == "ok"


@pytest.mark.parametrize("key", ["with a blank", "schlüssel"])
def test_a_key_that_cannot_be_sent_is_refused(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VERBATIM_ENGINE_API_KEY", key)
    with pytest.raises(CommandError, match="VERBATIM_ENGINE_API_KEY: a token is made of ASCII letters") as refused:
        open_engine_client(60.0)
    assert key not in str(refused.value)


@pytest.mark.parametrize("text", ["", "one\ntwo\n", "with a blank"])
def test_a_key_file_that_holds_no_key_or_several_is_refused(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(text)
    monkeypatch.setenv("VERBATIM_ENGINE_API_KEY_FILE", str(tmp_path / "key"))
    with pytest.raises(CommandError, match=f"VERBATIM_ENGINE_API_KEY_FILE {tmp_path}/key: "):
        open_engine_client(60.0)


@pytest.mark.parametrize("base", ["/v1beta/openai", "/api/paas/v4"])
def test_the_check_finds_the_routes_of_a_base_without_v1(base: str) -> None:
    with StrictServer(models=("small", MODEL), base=base) as server:
        url = f"{server.url}{base}"
        serves = f"serves small, large; not vLLM; calls go to {url}/chat/completions; "
        assert check(url, MODEL) == check(f"{url}/", MODEL) == ("ok", serves)
        state, found = check(url, MODEL, key="sk-wrong")
        assert state == "fix" and "it refuses the key: HTTP 401: Incorrect API key provided: Bearer …." in found
        state, found = check(f"{url}/chat", MODEL)
        assert state == "fix" and f"correct the URL: calls go to {url}/chat/v1/chat/completions or {url}/chat/chat/" in found
    with StrictServer(lists_models=False, base=base) as server:
        assert check(f"{server.url}{base}", MODEL) == ("ok", "lists no models; ")


def test_an_engine_that_is_busy_or_not_there_yet_is_waited_for() -> None:
    with StrictServer(lists_models=False) as server:
        assert check(server, MODEL) == ("ok", "lists no models; ")
    state, found = check(server)
    assert state == "note" and found.startswith("it does not answer yet: ")

    def limit(request: httpx.Request) -> httpx.Response:
        return httpx.Response(429, json={"error": {"message": f"Rate limit reached for {KEY}"}})

    with httpx.Client(transport=httpx.MockTransport(limit), headers={"Authorization": f"Bearer {KEY}"}) as client:
        found_busy = check_engine("http://vendor", client)
    assert (found_busy.state, found_busy.found) == ("note", "it is at its rate limit: HTTP 429: Rate limit reached for …")
