"""browser-use at a page in Chromium: it sends a screenshot with every step, in a message that takes the place of the one before."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from tests.harnesses.agent_run import Cli, Ended
from tests.harnesses.conftest import WINDOW
from tests.harnesses.installed import folder_of
from tests.harnesses.outside import Outside
from tests.harnesses.player import Player, Step
from tests.harnesses.stage import NO_ENDPOINT, Heard, Played
from tests.harnesses.truths import check_records, check_rows
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_images import SEEING
from tests.support.machine import require
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService

PROGRAM = Path(__file__).with_name("browser_agent.py")
THANKS = "<h1 style='color: green'>Thank you! Your order is 4711.</h1>"
SHOP = f"""<!doctype html><title>Shop</title><h1>Lamp</h1><button id="buy">Buy</button>
<script>document.getElementById("buy").onclick = () => {{ document.body.innerHTML = `{THANKS}` }}</script>"""
WINDOW_SIZE = (1920, 1080)
JUDGE = r"You are an expert judge"
"""With it begins the prompt by which the agent asks the same model whether it has done its task."""


@pytest.fixture(scope="module")
def shop() -> Iterator[str]:
    """The URL of a page with one button."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.send_header("Content-Length", str(len(SHOP)))
            self.end_headers()
            self.wfile.write(SHOP.encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def act(action: dict[str, Any]) -> Step:
    said = {"thinking": "I look.", "evaluation_previous_goal": "As wanted.", "memory": "A lamp.", "next_goal": "Go on."}
    return Step(json.dumps({**said, "action": [action]}))


def click(prompt: str) -> Step:
    return act({"click": {"index": int(re.findall(r"\[(\d+)\]<button", prompt)[-1])}})


@pytest.fixture(scope="module")
def service(redis_server: RedisServer) -> Iterator[tuple[ScriptedEngine, RunningService]]:
    with (
        ScriptedEngine(SEEING, max_model_len=WINDOW, most_images=8) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token") as service,
    ):
        yield engine, service


@pytest.fixture(scope="module")
def played(service: tuple[ScriptedEngine, RunningService], shop: str, tmp_path_factory: pytest.TempPathFactory) -> Played:
    engine, running = service
    done = {"done": {"text": "The order is 4711.", "success": True, "files_to_display": []}}
    verdict = {
        "reasoning": "It says so.",
        "verdict": True,
        "failure_reason": "",
        "impossible_task": False,
        "reached_captcha": False,
    }
    player = engine.script = Player(SEEING, [click, act(done)], {JUDGE: json.dumps(verdict)})
    session, home = running.session(), tmp_path_factory.mktemp("browser-use")
    with Outside() as outside, Heard(NO_ENDPOINT) as unknown:
        env = {
            **{name: value for name, value in os.environ.items() if name in ("PATH", "LANG")},
            **outside.variables,
            "HOME": str(home),
            "OPENAI_BASE_URL": session.base_url,
            "OPENAI_API_KEY": session.api_key,
            "ANONYMIZED_TELEMETRY": "false",
            "BROWSER_USE_VERSION_CHECK": "false",
        }
        command: list[str | Path] = [
            folder_of("browser-use") / "python",
            PROGRAM,
            require("chromium"),
            f"Buy the lamp at {shop} and tell the order.",
        ]
        run = subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=240)
    ended = Ended(run.returncode, run.stdout, run.stderr, 0.0)
    rows, accounting = session.trajectories()
    cli = Cli("browser-use", "chat", lambda workdir: [], change_at=0, streams=False)
    heard = player, list(engine.generations), session.calls, rows, accounting
    return Played(cli, session.session_id, ended, home, *heard, outside.asked, unknown.said)


def test_the_agent_sees_the_page_and_does_its_task(played: Played) -> None:
    assert played.ended.exit_code == 0 and "The order is 4711." in played.ended.stdout, str(played.ended)
    assert (played.player.surplus, played.player.left, played.unknown) == ([], 0, [])


@pytest.mark.case(76)
def test_each_call_is_sampled_from_its_own_screenshots_and_is_a_row(
    played: Played, service: tuple[ScriptedEngine, RunningService]
) -> None:
    """Nothing is appended: the next step's message stands where the last one's did. The judge sees all screenshots again."""
    check_records(played)
    check_rows(played)
    assert played.accounting["quarantined"] == []
    *steps, judge = played.calls
    assert len(played.rows) == len(played.calls) == 3
    seen = [[media["digest"] for media in call["media"]] for call in steps]
    assert [len(digests) for digests in seen] == [1, 1] and seen[0] != seen[1]
    assert {digest for digests in seen for digest in digests} <= {media["digest"] for media in judge["media"]}
    assert [[media["digest"] for media in row["media"]] for row in played.rows][:2] == seen
    for (digest,), call in zip(seen, steps, strict=True):
        image = service[1].request("GET", f"/sessions/{played.session_id}/media/{digest}")
        assert Image.open(io.BytesIO(image.content)).size == WINDOW_SIZE
        (place,) = call["media"]
        assert len({*call["prompt_ids"][place["start"] : place["start"] + place["length"]]}) == 1
