"""The `verbatim` command: what it teaches, and how it refuses. Every test runs the real command as a process."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.main import get_command

from cli.main import app
from cli.node import make_logs_folder
from cli.service import find_unknown
from cli.tables import make_table
from proxy.settings import Flag, Settings
from tests.support.documents.settings_in_code import variables
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import ADMIN, Serving, environment, verbatim

ENGINE = ("--engine", "http://127.0.0.1:9")


def refused(*args: str, code: int = 1, **variables: Any) -> str:
    """The one sentence on stderr of a command that must end with `code`."""
    done = verbatim(*args, **variables)
    assert done.returncode == code, done
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1 and lines[0].startswith("verbatim: "), done.stderr
    return lines[0]


def test_help_names_the_commands_and_says_what_they_are_for() -> None:
    shown = verbatim("--help")
    assert shown.returncode == 0
    assert "Reinforcement learning on any agent" in shown.stdout
    assert "serve " in shown.stdout and "sessions " in shown.stdout
    assert "..." not in verbatim("--help", COLUMNS="80").stdout.partition("Commands:")[2]


@pytest.mark.parametrize("command", ["serve", "node", "run", "generate", "export"])
def test_help_says_what_a_value_is_in_words_of_the_command(command: str) -> None:
    assert re.findall(r"^ +--\S+ <.*>", verbatim(command, "--help", COLUMNS="200").stdout, re.MULTILINE) == []


def test_a_flag_of_serve_has_the_name_the_default_and_the_text_of_its_setting() -> None:
    """They stood twice, and the texts of eleven of them differed."""
    main: Any = get_command(app)
    serve = main.commands["serve"]
    marked = {
        name: field for name, field in Settings.model_fields.items() if any(isinstance(each, Flag) for each in field.metadata)
    }
    options = {option.name: option for option in serve.params if option.name not in ("workers", "log_level")}
    assert options.keys() == marked.keys() and {"engine", "engine_api", "redis", "data_dir", "host", "port"} <= marked.keys()
    assert options["control_port"].opts == ["--control-port"] and options["engine"].multiple and options["open"].is_flag
    assert options["port"].help == f"{marked['port'].description} Default: 8700.".replace("\n", " ")
    assert options["engine_api"].help.count("need --renderer") == 1, "other settings are named as they are given"


def test_help_tells_of_the_environment_and_the_tokens() -> None:
    shown = verbatim("serve", "--help").stdout
    for variable in ("VERBATIM_ENGINE", "VERBATIM_ADMIN_TOKEN", "VERBATIM_TRAINER_TOKEN", "VERBATIM_DRAIN_SECONDS"):
        assert variable in shown


def test_the_command_alone_loads_neither_the_service_nor_its_libraries() -> None:
    heavy = "fastapi redis torch uvicorn aiohttp pydantic proxy trainer_client"
    program = f"import sys, cli.main; print([name for name in '{heavy}'.split() if name in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=True)
    assert loaded.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("command", "missing", "says"),
    [
        (
            "serve",
            "uvicorn",
            "the service is not installed (uvicorn is missing): in a clone of Verbatim, pip install '.[proxy]'",
        ),
        ("node", "msgspec", "verbatim node needs msgspec: in a clone of Verbatim, pip install '.[rollout]'"),
    ],
)
def test_a_command_that_lacks_its_part_says_what_to_install(command: str, missing: str, says: str) -> None:
    """It ended in a traceback."""
    program = f"import sys; sys.modules['{missing}'] = None; sys.argv[1:] = ['{command}']; import cli.main; cli.main.main()"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.strip()) == (1, f"verbatim: {says}")


def test_the_folder_of_a_nodes_logs_is_named_without_dots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    assert make_logs_folder(Path("../node")) == tmp_path / "node" / "logs"


def test_an_unknown_flag_is_a_usage_error() -> None:
    done = verbatim("serve", "--engines", "http://127.0.0.1:9")
    assert done.returncode == 2
    assert "--engines" in done.stderr and "Traceback" not in done.stderr


PLACE = ("serve", *ENGINE, "--port", "0")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("serve",), "--engine URL"),
        *((("serve", "--engine", url), url) for url in ("localhost:8000", "ftp://host:1", "http://", "http://host:port")),
        (("serve", "--engine", "http://host:99999"), "http://host:99999"),
        (("serve", *ENGINE, "--engine-api", "grpc"), "--engine-api (or VERBATIM_ENGINE_API) 'grpc'"),
        (("serve", *ENGINE, "--fsync", "never"), "--fsync (or VERBATIM_FSYNC) 'never'"),
        (("serve", *ENGINE, "--thinking", "drop"), "--thinking (or VERBATIM_THINKING) 'drop'"),
        (("serve", *ENGINE, "--log-level", "loud"), "'loud'"),
        # A socket takes it modulo 65536, and the service would be somewhere else.
        (("serve", *ENGINE, "--port", "65537"), "--port (or VERBATIM_PORT) '65537' is invalid"),
        ((*PLACE, "--redis", "redis-host"), "--redis"),
        (("sessions", "list"), "VERBATIM_ADMIN_TOKEN"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_flag_that_is_invalid_or_missing_is_named(args: tuple[str, ...], says: str) -> None:
    assert says in refused(*args, code=2)


@pytest.mark.parametrize(
    ("variable", "value", "says"),
    [
        ("VERBATIM_KEEPALIVE_SECONDS", "soon", "VERBATIM_KEEPALIVE_SECONDS 'soon' is invalid"),
        ("VERBATIM_ROLE_RULES", "[{", "VERBATIM_ROLE_RULES is not JSON"),
        (
            "VERBATIM_ADMISSION",
            '{"staleness": 1}',
            "is invalid: groups_per_version: staleness and groups_per_version are set together",
        ),
        ("VERBATIM_KEEP", '{"top_logprob": 5}', "top_logprob:"),
        ("VERBATIM_ADMIN_TOKEN_FILE", "nowhere", "VERBATIM_ADMIN_TOKEN_FILE is invalid: it cannot be read"),
        # Without deliveries every lease failed: 0 means "no limit" elsewhere.
        ("VERBATIM_GROUP", '{"max_deliveries": 0}', "VERBATIM_GROUP '0' is invalid: max_deliveries: "),
        ("VERBATIM_KEEPALIVE_SECONDS", "-1", "VERBATIM_KEEPALIVE_SECONDS '-1' is invalid"),
        ("VERBATIM_DRAIN_SECONDS", "inf", "VERBATIM_DRAIN_SECONDS 'inf' is invalid"),
        ("VERBATIM_DRAIN_SECONDS", "-1", "VERBATIM_DRAIN_SECONDS '-1' is invalid"),
        ("VERBATIM_ENGINE_CONNECT_SECONDS", "0", "VERBATIM_ENGINE_CONNECT_SECONDS '0' is invalid"),
        ("VERBATIM_WEIGHTS_TIMEOUT_SECONDS", "nan", "VERBATIM_WEIGHTS_TIMEOUT_SECONDS 'nan' is invalid"),
    ],
)
def test_a_variable_that_is_invalid_is_named_with_what_is_wrong(variable: str, value: str, says: str) -> None:
    sentence = refused("serve", *ENGINE, code=2, **{variable: value})
    assert sentence.startswith(f"verbatim: {variable} ") and says in sentence
    assert "host:8000" not in sentence and "--keepalive-seconds" not in sentence, "there is no such flag"


def test_an_engine_list_in_the_environment_that_is_no_json_is_explained() -> None:
    sentence = refused("serve", code=2, VERBATIM_ENGINE="http://127.0.0.1:9")
    assert "VERBATIM_ENGINE is not JSON" in sentence and """'["http://host:8000"]'""" in sentence


def test_a_variable_that_nothing_reads_is_warned_of_and_none_of_another_part_is() -> None:
    assert find_unknown(variables()) == []
    links = [
        f"VERBATIM_PROXY_{end}" for end in ("PORT", "SERVICE_HOST", "SERVICE_PORT_HTTP", "PORT_8700_TCP", "PORT_8700_TCP_ADDR")
    ]
    assert find_unknown(["VERBATIM_DRAIN_SECOND", "VERBATIM_ADMIN_TOKENS", "VERBATIM_TRACE_RATIO", *links]) == [
        ("VERBATIM_ADMIN_TOKENS", "VERBATIM_ADMIN_TOKEN"),
        ("VERBATIM_DRAIN_SECOND", "VERBATIM_DRAIN_SECONDS"),
        ("VERBATIM_TRACE_RATIO", ""),
    ]
    args = ("serve", *ENGINE, "--tls-cert", "none.crt", "--tls-key", "none.key")
    assert "VERBATIM_DRAIN_SECOND is not a setting" in verbatim(*args, VERBATIM_DRAIN_SECOND="5").stderr


def test_a_taken_port_is_reported(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        sentence = refused("serve", *ENGINE, "--port", str(port), "--data-dir", str(tmp_path / "data"))
    assert f"port {port} on 127.0.0.1 is taken" in sentence
    assert not (tmp_path / "data").exists()


def test_an_address_or_a_data_directory_that_cannot_be_had_is_refused(tmp_path: Path) -> None:
    """/proc refuses even root, so the test means the same for every user."""
    occupied = tmp_path / "file"
    occupied.write_text("")
    assert "not an address of this machine" in refused("serve", *ENGINE, "--host", "192.0.2.1", "--data-dir", str(tmp_path))
    assert f"data directory {occupied} is not writable" in refused(*PLACE, "--data-dir", str(occupied))
    assert "/proc/verbatim is not writable" in refused(*PLACE, "--data-dir", "/proc/verbatim")


def test_a_redis_that_does_not_answer_is_named_without_its_password() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        place = f"127.0.0.1:{unused.getsockname()[1]}"
        command = ("serve", *ENGINE, "--port", "0", "--redis", f"redis://me:hidden@{place}/0")
        sentence = refused(*command, VERBATIM_REDIS_RETRY_SECONDS="0")
        waited = verbatim(*command, VERBATIM_REDIS_RETRY_SECONDS="0.5")
    assert place in sentence and "--redis" in sentence
    assert waited.returncode == 1 and f"waiting up to 0.5 s for the Redis at {place}" in waited.stderr
    assert sentence in waited.stderr and "does not answer: connection refused; start it" in sentence
    assert waited.stderr.count("does not answer") == 1 and "Error" not in waited.stderr
    assert "hidden" not in sentence + waited.stderr


def test_a_second_service_on_one_data_directory_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with Serving(*ENGINE, data_dir=data) as first:
        sentence = refused("serve", *ENGINE, "--port", "0", "--data-dir", str(data))
        assert f"{data} is in use by another service" in sentence
        assert str(first.pid) in sentence
        assert first.request("GET", "/healthz").status_code == 200


@pytest.mark.parametrize("token", ["hid\nden", "hid den", "hiddén"])
def test_a_token_that_cannot_be_sent_is_refused_and_not_shown(token: str, tmp_path: Path) -> None:
    """The HTTP client's error quotes the header; a node waits for its service and had the token in its log."""
    for command in (("sessions", "list"), ("node", "--data-dir", str(tmp_path))):
        sentence = refused(*command, code=2, VERBATIM_URL="http://127.0.0.1:9", VERBATIM_ADMIN_TOKEN=token)
        assert "VERBATIM_ADMIN_TOKEN holds no token" in sentence and "hid" not in sentence


def test_sessions_without_a_service_says_where_it_looked() -> None:
    sentence = refused("sessions", "list", VERBATIM_URL="http://127.0.0.1:9", VERBATIM_ADMIN_TOKEN="x")
    assert "http://127.0.0.1:9" in sentence and "VERBATIM_URL" in sentence


@pytest.fixture(scope="module")
def serving(redis_server: RedisServer) -> Iterator[RunningService]:
    with RunningService(ENGINE[1], redis_server.url) as service:
        yield service


def test_sessions_are_listed_and_shown(serving: RunningService) -> None:
    created = serving.request("POST", "/sessions", json={"session_id": "first", "group_id": "g7"})
    assert created.status_code == 201, created.text
    service: dict[str, Any] = {"VERBATIM_URL": serving.url, "VERBATIM_ADMIN_TOKEN": ADMIN}
    listed = verbatim("sessions", "list", **service)
    assert listed.returncode == 0, listed.stderr
    assert "first" in listed.stdout and "g7" in listed.stdout and "open" in listed.stdout
    shown = verbatim("sessions", "show", "first", **service)
    assert shown.returncode == 0, shown.stderr
    assert "0 tokens sampled = 0 exported in 0 trajectories + 0 quarantined" in shown.stdout
    assert "nobody" in refused("sessions", "show", "nobody", **service)
    wrong = {**service, "VERBATIM_ADMIN_TOKEN": "wrong"}
    assert "token" in refused("sessions", "list", **wrong)


def test_what_has_no_room_in_a_table_goes_on_in_the_next_line() -> None:
    shown = StringIO()
    table = make_table("logs", "call", "continues")
    table.add_row("/var/lib/verbatim-node/logs/a-task/0.1", "01a2012141381bfba3db7958", "01a20121424fbaeb929c8443")
    Console(file=shown, width=40).print(table)
    rows = [line[1:-1].split("│") for line in shown.getvalue().splitlines() if line.startswith("│")]
    columns = ["".join(part.strip() for part in parts) for parts in zip(*rows, strict=True)]
    assert columns == ["/var/lib/verbatim-node/logs/a-task/0.1", "01a2012141381bfba3db7958", "01a20121424fbaeb929c8443"]


def test_a_sessions_id_is_listed_whole_and_its_group_as_it_is_named(serving: RunningService) -> None:
    session_id = serving.request("POST", "/sessions", json={"group_id": "[/x][red]", "task_id": "[t]"}).json()["session_id"]
    service: dict[str, Any] = {"VERBATIM_URL": serving.url, "VERBATIM_ADMIN_TOKEN": ADMIN}
    assert session_id in verbatim("sessions", "list", **service, COLUMNS="80").stdout
    (piped,) = [line for line in verbatim("engines", "list", **service, COLUMNS="").stdout.splitlines() if "127" in line]
    assert "127.0.0.1:9" in piped and "(default)" in piped and "cannot connect" in piped
    wide = verbatim("sessions", "list", **service, COLUMNS="140")
    assert wide.returncode == 0, wide.stderr
    assert "[/x][red]" in wide.stdout and "[t]" in wide.stdout
