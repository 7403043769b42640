"""Record a plain run of an agent anew: `python -m tests.harnesses.record kilo` writes `recorded/kilo.json`.

The agent has to be installed first, in an environment or a folder of its own: .cache/harnesses/kilo/bin/kilo.
"""

from __future__ import annotations

import json
import platform
import sys
import tempfile
import threading
from http.client import HTTPConnection
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import takewhile
from pathlib import Path
from typing import Any, Self
from urllib.parse import urlsplit

from rollout.harnesses.catalogue import load
from tests.harnesses.agent_run import Cli, run
from tests.harnesses.installed import INSTALLED
from tests.harnesses.outside import Outside
from tests.harnesses.player import Player
from tests.harnesses.recorded_run import CALL_ID, FOLDER, WORKDIR, Json
from tests.harnesses.scratch import TASK, make_repository
from tests.harnesses.test_recorded_agents import AGENTS
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import running_redis
from tests.support.service.running_service import RunningService

LONGEST = 200
"""Characters that are kept of a description or a system prompt."""
OF_THE_CONNECTION = {"authorization", "host", "connection", "content-length", "accept-encoding", "transfer-encoding", "accept"}


class Recorder:
    """Forwards requests to the server at `target`. Used in a `with` block; `url` is the near end, `requests` are the paths, headers
    and bodies."""

    def __init__(self, target: str) -> None:
        address, requests = urlsplit(target).netloc, []

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.do_POST()

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length", 0)))
                if body:
                    requests.append((self.path, {name.lower(): value for name, value in self.headers.items()}, body.decode()))
                connection = HTTPConnection(address)
                connection.request(self.command, self.path, body, {**self.headers, "Host": address})
                reply = connection.getresponse()
                self.send_response(reply.status)
                self.send_header("Content-Type", reply.headers["Content-Type"])
                self.end_headers()
                while piece := reply.read1():
                    self.wfile.write(piece)

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.requests: list[tuple[str, dict[str, str], str]] = requests

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


def record(cli: Cli, folder: Path) -> Json:
    """One plain run, as `RecordedRun` reads it."""
    workdir = make_repository(folder / "work")
    with (
        running_redis() as redis,
        ScriptedEngine("qwen3", max_model_len=131_072) as engine,
        RunningService(engine.url, redis.url, engine_api="token") as service,
        Recorder(service.url) as recorder,
        Outside() as outside,
    ):
        engine.script = Player(engine.family, cli.steps(workdir))
        session = service.session()
        address = session.base_url.removesuffix("/v1").replace(service.url, recorder.url)
        options: Json = {"at_home": lambda home: None, "timeout_seconds": 240.0}
        ended = run(cli, address, session.api_key, TASK, workdir, outside.variables, **options)
        if ended.exit_code or (workdir / "number.py").read_text() != "value = 42\n":
            sys.exit(str(ended))
    prefix = urlsplit(session.base_url).path
    requests = [(path.removeprefix(prefix), headers, _anonymous(text, workdir)) for path, headers, text in recorder.requests]
    return _recorded(f"{cli.harness} {load(cli.harness).version}", requests)


def _anonymous(text: str, workdir: Path) -> str:
    """Without the names of this machine."""
    return text.replace(str(workdir), str(WORKDIR)).replace(str(INSTALLED), "/installed").replace(platform.release(), "6.1")


def _recorded(agent: str, requests: list[tuple[str, dict[str, str], str]]) -> Json:
    """Raises ValueError where the requests differ in more than their messages."""
    ids = dict.fromkeys(CALL_ID.findall("".join(text for _, _, text in requests)))
    bodies = []
    for _, _, text in requests:
        for number, minted in enumerate(ids):
            text = text.replace(minted, f"<call {number}>")
        bodies.append(_cut(json.loads(text)))
    before: list[Json] = []
    turns = []
    for body in bodies:
        messages = body.pop("messages")
        kept = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(before, messages, strict=False))))
        turns.append({"kept": kept, "messages": messages[kept:]})
        before = messages
    (path,), body = {path for path, _, _ in requests}, bodies[0]
    if any(other != body for other in bodies):
        raise ValueError("the requests differ in more than their messages")
    shared = set.intersection(*(set(headers.items()) for _, headers, _ in requests))
    headers = {name: value for name, value in sorted(shared) if name not in OF_THE_CONNECTION}
    return {"agent": agent, "path": path, "headers": headers, "body": body, "turns": turns}


def _cut(body: Json) -> Json:
    def cut(value: Any) -> Any:
        if isinstance(value, str):
            return value if len(value) <= LONGEST else value[:LONGEST] + "…"
        if isinstance(value, dict):
            return {name: cut(each) for name, each in value.items()}
        return [cut(each) for each in value] if isinstance(value, list) else value

    system = [cut(each) if each["role"] in ("system", "developer") else each for each in body["messages"]]
    return {**body, "messages": system, **({"tools": cut(body["tools"])} if "tools" in body else {})}


if __name__ == "__main__":
    (wanted,) = [agent for agent in AGENTS if agent.harness == sys.argv[1]]
    with tempfile.TemporaryDirectory() as folder:
        found = record(wanted, Path(folder))
    (FOLDER / f"{wanted.harness}.json").write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
