"""What the documentation tells to type runs: block by block, page by page, against a real service with a scripted engine.

A block that begins with `# needs: …`, or has the tools of a cluster, is not run, for a reason that docs_blocks lists; its `verbatim`
commands are held against the command line like all others. Addresses of the documentation (127.0.0.1:8700, redis://redis:6379 and so
on) are those of the test. Commands that serve until they are stopped are stopped once they serve, and what measures does so with few
calls.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import signal
import socket
import socketserver
import stat
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.core import TyperGroup

from cli.main import app
from cli.rollout_service import KNOWN, add_rollouts
from contract.deltas import stamp, write_digests
from contract.tensor_files import Tensor, write_file
from rollout.harnesses import catalogue
from tests import ROOT
from tests.cli.serving.test_tls import make
from tests.support.documents.docs_blocks import PAGES, SHELLS, Block, blocks_of, shown_commands
from tests.support.engine.peer_deltas import make_versions, save, write_slime
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.forked import ForkedVerbatim
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import ADMIN, TRAINER, RunningService
from tests.support.service.verbatim_process import environment, runs, wait_until

SHIM = r"""#!/bin/bash
# verbatim, but what serves until it is stopped ends once it serves; a node goes on until the page is over; few calls measure.
# The command is not started here: the test forks a process that has imported it.
verbatim() { exec "$PYTHON" -I -S "$PAGE/bin/hand_over" "$@"; }
log=$(mktemp "$PAGE/log.XXXX")
served() { until grep -q "$1" "$log"; do kill -0 $! 2>/dev/null || { cat "$log" >&2; exit 1; }; sleep 0.05; done; }
case "$1" in
serve)
    verbatim "$@" --port 0 --data-dir "$(mktemp -d "$PAGE/data.XXXX")" >"$log" 2>&1 &
    served application/json; kill -TERM $!; wait $! ;;
node)
    verbatim "$@" --data-dir "$(mktemp -d "$PAGE/node.XXXX")" >"$log" 2>&1 &
    echo $! >>"$PAGE/nodes" ;;
bench) verbatim "$@" --calls 6 --connections 2 ;;
*) verbatim "$@" ;;
esac
"""
HAND_OVER = """
import json, os, signal, socket, sys
with socket.socket(socket.AF_UNIX) as channel:
    channel.connect("\\0" + os.environ["COMMANDS"])
    socket.send_fds(channel, [b"."], [0, 1, 2])
    channel.sendall(json.dumps([sys.argv[1:], os.getcwd(), dict(os.environ)]).encode() + b"\\n")
    answers = channel.makefile()
    command = int(answers.readline())
    signal.signal(signal.SIGTERM, lambda number, _: os.kill(command, number))
    sys.exit(int(answers.readline()))
"""
PYTHON_SHIM = r"""#!/bin/bash
# python, but the engine of the tests ends once it has said where it is.
[[ "$2" == tests.support.engine.scripted_engine ]] || exec "$PYTHON" "$@"
log=$(mktemp "$PAGE/log.XXXX")
cd "$ROOT"
"$PYTHON" "${@/8000/0}" >"$log" &
until grep -q ^http "$log"; do kill -0 $! || exit 1; sleep 0.05; done
kill $!; wait $! || true
"""
ASKS_ONCE = """
import json, os, urllib.request
body = json.dumps({'model': 'policy', 'messages': [{'role': 'user', 'content': 'x'}]}).encode()
key = {'authorization': 'Bearer ' + os.environ['OPENAI_API_KEY']}
asked = urllib.request.Request(os.environ['OPENAI_BASE_URL'] + '/chat/completions', body, key)
urllib.request.urlopen(asked).read()
"""
AGENT = {
    "name": "asks-once",
    "description": "Asks once.",
    "dialect": "chat",
    "argv": ["python3", "-c", ASKS_ONCE, "{prompt}"],
    "env": {"OPENAI_BASE_URL": "{openai}", "OPENAI_API_KEY": "{api_key}"},
}


class Command(socketserver.StreamRequestHandler):
    """A command typed into a page's shell, which passes its standard streams along and gets the process id, then the exit code."""

    def handle(self) -> None:
        _, streams, _, _ = socket.recv_fds(self.request, 1, 3)
        args, folder, variables = json.loads(self.rfile.readline())
        of_the_shell = dict(zip(("stdin", "stdout", "stderr"), streams, strict=True))
        with ForkedVerbatim(args, cwd=folder, env=variables, **of_the_shell) as process:
            for stream in streams:
                os.close(stream)
            self.wfile.write(b"%d\n" % process.pid)
            self.wfile.write(b"%d\n" % process.wait())


@pytest.fixture(scope="module")
def commands() -> Iterator[str]:
    """The name of the socket that takes commands."""
    name = f"verbatim-commands-{secrets.token_hex(8)}"
    with socketserver.ThreadingUnixStreamServer(f"\0{name}", Command) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield name
        finally:
            server.shutdown()
            thread.join()


def tasks(page: Page) -> None:
    runtime = {"kind": "local", "network": "full", "options": {"sandbox": "none"}}
    body = {"instruction": "Ask.", "harness": {"definition": AGENT}, "runtime": runtime, "model": "policy"}
    (page.folder / "tasks.jsonl").write_text(json.dumps(body) + "\n")


def dead_letters(page: Page) -> None:
    """One of group task-7, whose second member failed and is not replaced."""
    for status in ("completed", "failed"):
        session = page.service.session(group_id="task-7", group_size=2, group_replacements=False)
        session.ask("q")
        session.close(status, reward=1.0)


def checkpoints(page: Page) -> None:
    """Two anchors, as a trainer writes them, and a delta of slime's after a whole version."""
    made = make_versions(2)
    save(page.folder / "weight_v000011", made[0])
    write_slime(page.folder, 12, made[0], made[1])
    tensor = Tensor("BF16", (3,), np.arange(3, dtype="u2"))
    for version in (11, 12):
        (folder := page.folder / f"version-{version}").mkdir()
        write_file(folder / "model.safetensors", {"w": ("BF16", (3,))}, [("w", tensor)])
        write_digests(folder, {"w": stamp(tensor)}, version)
    pushed = page.service.request("POST", "/weights", json={"version": 11, "path": str(page.folder / "version-11")})
    assert pushed.json()["applied"], pushed.text


def certificate(page: Page) -> None:
    make(page.folder)


def closed_session(page: Page) -> None:
    session = page.service.session()
    session.ask("q")
    session.close(reward=1.0)


def an_agent_and_a_repository(page: Page) -> None:
    """A file of tasks, a repository to clone, and an agent that the node of the page has in place of Pi."""
    tasks(page)
    repository = page.folder / "repository"
    repository.mkdir()
    (repository / "Makefile").write_text("test:\n\ttrue\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b.c", "-C", str(repository)]
    for words in (["init", "-q"], ["add", "Makefile"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    runtime = {"kind": "local", "network": "full", "options": {"sandbox": "none"}}
    agent = json.dumps({"definition": AGENT}).replace("'", "'\\''")
    page.said |= {
        "https://example.com/repo.git": str(repository),
        '"harness": "pi", "num_samples": 8': f'"harness": {agent}, "num_samples": 2, "runtime": {json.dumps(runtime)}',
    }


STAGES: dict[str, Callable[[Page], None]] = {
    "docs/delivery.md": dead_letters,
    "docs/security.md": certificate,
    "docs/store.md": closed_session,
    "docs/tasks.md": an_agent_and_a_repository,
    "docs/weights.md": checkpoints,
}
"""What a page takes for granted."""
WITH_PROGRAMS = {"README.md", "docs/quickstart.md"}
"""Pages whose Python is run between their commands."""


class Page:
    """A page that is followed from top to bottom in one folder: variables that a block exports are there in the next one."""

    def __init__(
        self, folder: Path, service: RunningService, engine: ScriptedEngine, redis: RedisServer, commands: str
    ) -> None:
        self.folder, self.service = folder, service
        self.said = {
            "http://127.0.0.1:8700": service.url,
            "http://proxy:8700": service.url,
            "http://127.0.0.1:8000": engine.url,
            "http://vllm:8000": engine.url,
            "redis://redis:6379": redis.url,
            "redis://127.0.0.1:6379": redis.url,
            "VERBATIM_ADMIN_TOKEN=...": f"VERBATIM_ADMIN_TOKEN={ADMIN}",
            "an-admin-of-mine": ADMIN,
            "a-trainer-of-mine": TRAINER,
            "/shared/weights": str(folder),
            "/tmp/claude-home": str(folder / "claude-home"),
        }
        self.names: dict[str, Any] = {}
        tools = folder / "bin"
        tools.mkdir()
        for name, text in (("verbatim", SHIM), ("python", PYTHON_SHIM), ("hand_over", HAND_OVER)):
            (tools / name).write_text(text)
            (tools / name).chmod(stat.S_IRWXU)
        self.variables = environment(
            PATH=f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            PAGE=str(folder),
            COMMANDS=commands,
            PYTHON=sys.executable,
            ROOT=str(ROOT),
            VERBATIM_ADMIN_TOKEN=ADMIN,
            VERBATIM_LOCAL_DIR=str(folder / "local"),
            VERBATIM_LOCAL_SANDBOX="none",
            VERBATIM_TRAINER_TOKEN=TRAINER,
            VERBATIM_URL=service.url,
        )

    def shell(self, block: Block) -> None:
        text = block.text
        for said, meant in self.said.items():
            text = text.replace(said, meant)
        script = f'set -euo pipefail\n{text}\nenv -0 >"$PAGE/variables"\n'
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=self.folder,
            env=self.variables,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        assert done.returncode == 0, f"{block.page}:{block.line}\n{text}\n{done.stdout}\n{done.stderr}"
        pairs = (self.folder / "variables").read_text().rstrip("\0").split("\0")
        self.variables = dict(pair.split("=", 1) for pair in pairs)

    def program(self, block: Block, patch: pytest.MonkeyPatch) -> None:
        for name in ("VERBATIM_URL", "VERBATIM_ADMIN_TOKEN", "VERBATIM_TRAINER_TOKEN"):
            patch.setenv(name, self.variables[name])
        exec(compile(block.text, f"{block.page}:{block.line}", "exec"), self.names)

    def leave(self) -> None:
        for name in ("admin", "agent"):
            if name in self.names:
                self.names[name].close()
        nodes = self.folder / "nodes"
        for pid in map(int, nodes.read_text().split() if nodes.exists() else ()):
            os.kill(pid, signal.SIGTERM)
            wait_until(lambda pid=pid: not runs(pid), 60, "a node ends")  # type: ignore[misc]


@pytest.fixture
def page(tmp_path: Path, redis_server: RedisServer, commands: str) -> Iterator[Page]:
    redis_server.flushall()
    with (
        ScriptedEngine() as engine,
        RunningService(engine.url, redis_server.url, adding=[partial(add_rollouts, KNOWN)], engine_api="token") as service,
    ):
        page = Page(tmp_path, service, engine, redis_server, commands)
        try:
            yield page
        finally:
            page.leave()


def runnable(path: Path) -> list[Block]:
    kinds = (*SHELLS, "python") if path.relative_to(ROOT).as_posix() in WITH_PROGRAMS else SHELLS
    return [block for block in blocks_of(path) if block.language in kinds and not block.needs]


def followed() -> dict[str, Path]:
    """The pages that have blocks to run, by their names.

    Programs of other pages than `WITH_PROGRAMS` are run in docs/test_readme.py and docs/test_off_policy.py.
    """
    found: dict[str, Path] = {}
    for path in PAGES:
        if any(block.language in SHELLS for block in runnable(path)):
            found[path.relative_to(ROOT).as_posix()] = path
    return found


FOLLOWED = followed()


@pytest.mark.timeout(1800)  # a page is up to twenty processes one after the other
@pytest.mark.parametrize("name", FOLLOWED)
def test_the_commands_of_a_page_run(page: Page, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if name in STAGES:
        STAGES[name](page)
    for block in runnable(FOLLOWED[name]):
        if block.language == "python":
            page.program(block, monkeypatch)
        else:
            page.shell(block)
    if name == "docs/tasks.md":
        task = page.service.request("GET", "/tasks/bug-7").json()
        assert (task["status"], task["usable"]) == ("completed", 2), task


def test_the_readmes_program_leases_its_own_rows_whatever_was_run_before(
    page: Page, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It got the rows of the session that the quick start leaves, and printed their tokens as its own."""
    blocks = runnable(ROOT / "README.md")
    program, _ = [block for block in blocks if block.language == "python"]
    for block in [*(block for block in blocks if block.language != "python"), program, program]:
        if block is not program:
            page.shell(block)
            continue
        page.program(block, monkeypatch)
        page.names["admin"].close()
        page.names["agent"].close()
        own = page.names["session"]["session_id"]
        assert {row.session_id for row in page.names["batch"].rows} == {own}
        call = page.service.request("GET", f"/sessions/{own}/calls").json()["calls"][0]
        assert f"with {len(call['completion_ids'])} sampled tokens" in capsys.readouterr().out


def test_a_block_that_runs_leaves_the_system_alone() -> None:
    """One whose commands would change it says what it needs; a test that ran as root would install what it shows."""
    outside = re.compile(r"(?:^|[\s=])/(?:etc|opt|usr|var|srv)/", re.MULTILINE)
    assert [f"{block.page}:{block.line}" for path in PAGES for block in runnable(path) if outside.search(block.text)] == []


def test_a_block_that_is_not_run_says_why_and_names_files_that_are_there() -> None:
    left = [block for path in PAGES for block in blocks_of(path) if block.language in SHELLS and block.needs]
    assert [f"{block.page}:{block.line} {block.needs}" for block in left if not block.reason] == []
    named = {word for block in left for word in re.findall(r"(?:deploy|helm)/[\w./-]*\w", block.text)}
    assert named and [word for word in sorted(named - {"deploy/.env"}) if not (ROOT / word).exists()] == []


@cache
def the_command() -> Any:
    return typer.main.get_command(app)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_every_verbatim_command_that_is_shown_exists_with_its_flags(path: Path) -> None:
    for where, words in shown_commands(path):
        command, rest = the_command(), words[1:]
        while isinstance(command, TyperGroup) and rest:
            assert rest[0] in command.commands or rest[0].startswith("-"), f"{where}: verbatim has no {' '.join(words[1:3])}"
            command = command.commands.get(rest[0], command)
            rest = rest[1:]
        known = {flag for parameter in command.params for flag in (*parameter.opts, *parameter.secondary_opts)} | {
            "--help",
            "--version",
        }
        given = rest[: rest.index("--")] if "--" in rest else rest
        flags = {word.partition("=")[0] for word in given if re.match(r"--[a-z]", word)}
        assert flags <= known, f"{where}: {' '.join(words)} has no {', '.join(flags - known)}"
        if "--harness" in given and re.fullmatch("[a-z-]+", harness := given[given.index("--harness") + 1]):
            assert harness in (*catalogue.names(), "my-agent"), where


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_python_that_is_shown_compiles_and_what_make_and_python_are_told_exists(path: Path) -> None:
    for block in blocks_of(path):
        if block.language == "python":
            compile(block.text, f"{block.page}:{block.line}", "exec")
    text = path.read_text()
    for makefile, target in re.findall(r"(?:^|`)make (?:-f (\S+) )?([a-z][a-z-]*)", text, re.MULTILINE):
        assert re.search(rf"^{target}:", (ROOT / (makefile or "Makefile")).read_text(), re.MULTILINE), target
    for module in re.findall(r"python -m ((?:benchmarks|examples)[\w.]*)", text):
        assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), module


def test_no_command_hides_where_it_is_not_run() -> None:
    hidden = re.compile(r"^\n {4}(?:\$ )?(?:verbatim|pip|python|make|docker|helm|kubectl) .*", re.MULTILINE)
    shown = [f"{path.name}: {line.strip()}" for path in PAGES for line in hidden.findall(path.read_text())]
    assert shown == []
