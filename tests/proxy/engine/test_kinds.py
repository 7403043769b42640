"""Kinds of engines are found by their entry points: one from outside the package serves calls like a built-in one.

The engine of these tests shouts: a character is a token, its id the code point, and the reply is the last message in capitals.

    prompt      u : h i \\n a :        completion      H I
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from pydantic import ValidationError

from proxy.engine.pool.pool import EnginePool
from proxy.settings import Settings
from tests.support.distributions import Distributions
from tests.support.engine.weight_fixtures import until
from tests.support.service.running_service import RunningService, streamed_text

SHOUTING = """
from proxy.dialects.base import Delta, FirstToken
from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.renderer import Rendered
from proxy.engine.apis.reply import EngineChoice, EngineReply
from proxy.engine.wire.http import EngineAnswer
from reconstruct.records import pack_ids
from reconstruct.spans import Span


class Event(EngineAnswer):
    ids: list[int] = []


class Shouting(EngineKind):
    name = "shouting"
    detection_order = 5

    async def detect(self, probe, *, asked):
        return None if (await probe.read("/shouts")).get("loud") else "it does not shout"

    async def takes_weights(self, probe):
        return False

    async def render(self, replica, request, rendering, id_text):
        text = "".join(f"{message['role'][0]}:{message['content']}\\n" for message in rendering.messages)
        ids = [ord(letter) for letter in text + ("a:" if rendering.add_generation_prompt else "")]
        return Rendered(pack_ids(ids), {})

    async def sample(self, replica, job, *, stream, emit):
        ids, begun = [], not stream
        body = {"ids": job.prompt_json, "stream": stream}

        def take(events):
            nonlocal begun
            if not begun:
                begun = True
                emit(FirstToken())
            for event in events:
                ids.extend(event.ids)
            if stream:
                emit([Delta(0, "".join(map(chr, event.ids))) for event in events])

        async with self._http.receive(replica, "/shout", body, Event, job.scope, stream=stream) as answers:
            await answers.follow(take)
        message = {"role": "assistant", "content": "".join(map(chr, ids))}
        spans = (Span(replica.weight_version, 0, len(ids)),)
        return EngineReply([EngineChoice(0, ids, [-0.5] * len(ids), spans, "stop", None, message)], None, len(job.prompt_ids))
"""


class ShoutingEngine(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        answers = {"/v1/models": {"data": [{"id": "policy", "max_model_len": 64}]}, "/shouts": {"loud": True}}
        answer = answers.get(self.path)
        self._answer(404 if answer is None else 200, json.dumps(answer).encode())

    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.path != "/shout":
            self._answer(404, b"{}")
            return
        question = "".join(map(chr, asked["ids"])).split("\n")[-2].removeprefix("u:")
        ids = [ord(letter) for letter in question.upper()]
        events = [b'data: {"ids": [%d]}\n\n' % token for token in ids] + [b"data: [DONE]\n\n"]
        self._answer(200, b"".join(events) if asked["stream"] else json.dumps({"ids": ids}).encode())

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def engine_url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), ShoutingEngine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


GROUP = "verbatim.engines"


@pytest.mark.parametrize("engine_api", ["auto", "shouting"])
def test_an_engine_from_outside_the_package_serves_calls(
    engine_url: str, redis_url: str, distributions: Distributions, engine_api: str
) -> None:
    distributions.install("shouting", GROUP, "shouting = shouting:Shouting", shouting=SHOUTING)
    with RunningService(engine_url, redis_url, engine_api=engine_api) as service:
        session = service.session()
        assert session.ask("hi").choices[0].message.content == "HI"
        assert streamed_text(session.ask("who?", stream=True))[0] == "WHO?"
        for call, asked in zip(session.calls, ("hi", "who?"), strict=True):
            count = len(asked)
            assert (call["api"], call["status"], call["finish_reason"]) == ("shouting", "finished", "stop")
            assert "".join(map(chr, call["prompt_ids"])) == f"u:{asked}\na:"
            assert "".join(map(chr, call["completion_ids"])) == asked.upper()
            assert (call["logprobs"], call["weight_versions"]) == ([-0.5] * count, [[0, 0, count]])


def test_an_unknown_kind_is_refused_with_the_known_ones(distributions: Distributions) -> None:
    distributions.install("shouting", GROUP, "shouting = shouting:Shouting", shouting=SHOUTING)
    with pytest.raises(
        ValidationError, match=r"there is no engine 'whispering': choose one of chat, .*, shouting, token, or auto"
    ):
        Settings(engine_api="whispering")


@pytest.mark.parametrize(
    ("code", "says"), [("", "AttributeError"), ("class Mute:\n    name = 'deaf'", "it calls itself 'deaf'")]
)
def test_a_kind_that_cannot_be_loaded_is_named_where_it_is_wanted_and_left_out_elsewhere(
    distributions: Distributions, caplog: pytest.LogCaptureFixture, code: str, says: str
) -> None:
    """It used to keep a service from starting that had no use for it."""
    distributions.install("mute", GROUP, "mute = mute:Mute", mute=code)
    with pytest.raises(ValidationError, match=f"the engine 'mute' .* cannot be loaded: {says}"):
        Settings(engine_api="mute")
    EnginePool(Settings(engine=["http://127.0.0.1:9"]))
    assert "the engine 'mute' (mute:Mute of mute 1.0) cannot be loaded" in caplog.text


async def test_a_kind_whose_detection_fails_is_tried_again(
    engine_url: str, distributions: Distributions, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """An error that no probe raises used to end the replica's visits for good."""
    monkeypatch.setattr("proxy.engine.pool.standing.RETRY_SECONDS", 0.02)
    failing = SHOUTING.replace(
        "        return None if (await",
        "        self.tries = getattr(self, 'tries', 0) + 1\n"
        "        if self.tries < 3:\n"
        "            raise KeyError('volume')\n"
        "        return None if (await",
    )
    distributions.install("hoarse", GROUP, "hoarse = hoarse:Shouting", hoarse=failing.replace('"shouting"', '"hoarse"'))
    pool = EnginePool(Settings(engine=[engine_url], engine_api="hoarse"))
    await pool.start()
    try:
        await until(lambda: pool.ready()[0], lambda: pool.ready()[1])
    finally:
        await pool.stop()
    assert caplog.text.count("KeyError: 'volume'") == 2
