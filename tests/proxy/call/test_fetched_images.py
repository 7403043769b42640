"""Images named by address: fetched by the service where the operator allows it, never from where a harness may not reach."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai
import pytest

from proxy.call import fetch
from proxy.call.fetch import ImageFetcher
from proxy.errors import RequestError
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_images import SEEING, picture
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService, Session

RED = picture("red")


class Site(BaseHTTPRequestHandler):
    """Serves RED, and answers that lead elsewhere or are too long."""

    def do_GET(self) -> None:
        answers: dict[str, tuple[int, str, bytes]] = {
            "/red.png": (200, "", RED),
            "/moved": (302, "/red.png", b""),
            "/round": (302, "/round", b""),
            "/inside": (302, f"http://127.0.0.2:{self.server.server_address[1]}/red.png", b""),
            "/file": (302, "file:///etc/passwd", b""),
            "/long": (200, "", b"x" * 20_000),
            "/text": (200, "", b"hello"),
        }
        status, location, body = answers.get(self.path.partition("?")[0], (404, "", b""))
        self.send_response(status)
        if location:
            self.send_header("location", location)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Site)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    thread.join()
    server.server_close()


@contextmanager
def service(redis_server: RedisServer, **settings: Any) -> Iterator[Session]:
    with (
        ScriptedEngine(SEEING, most_images=4) as engine,
        RunningService(engine.url, redis_server.url, engine_api="token", max_image_bytes=10_000, **settings) as running,
    ):
        yield running.session()


def ask(session: Session, url: str) -> Any:
    return session.answer([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}])


def test_a_fetched_image_is_the_one_that_its_bytes_are(redis_server: RedisServer, site: str) -> None:
    with service(redis_server, remote_media=True, remote_media_private=True) as session:
        first = ask(session, f"{site}/red.png")
        assert first["content"]
        ask(session, f"{site}/moved?token=1")
        digest = hashlib.sha256(RED).hexdigest()
        assert [[each["digest"] for each in call["media"]] for call in session.calls] == [[digest], [digest]]
        assert site not in str(session.calls[0]["messages"])
        for path, reason in (
            ("/none", "the answer is 404"),
            ("/round", "more than 3 redirections"),
            ("/file", "only http and https"),
            ("/long", "more than 10000 bytes"),
            ("/text", "cannot be decoded"),
        ):
            with pytest.raises(openai.BadRequestError, match=reason):
                ask(session, site + path)
        assert len(session.calls) == 2


def test_addresses_of_private_networks_are_refused(redis_server: RedisServer, site: str) -> None:
    with service(redis_server, remote_media=True) as session:
        with pytest.raises(openai.BadRequestError, match="is in a private network"):
            ask(session, f"{site}/red.png")
        with pytest.raises(openai.BadRequestError, match="names its video by address"):
            part = {"type": "video_url", "video_url": {"url": f"{site}/red.png"}}
            session.answer([{"role": "user", "content": [part]}])
        assert session.calls == []


@pytest.mark.parametrize(
    "host",
    ["127.0.0.1", "localhost", "[::1]", "[::ffff:127.0.0.1]", "10.1.2.3", "169.254.169.254", "0.0.0.0", "0x7f.1", "2130706433"],
)
async def test_no_spelling_of_a_private_address_is_asked(host: str) -> None:
    with pytest.raises(RequestError, match=r"private network|not a canonical IPv4 address"):
        await ImageFetcher(private=False, most_bytes=10).fetch(f"http://{host}:9/x")


async def test_a_redirection_to_a_private_address_is_refused(site: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch, "_is_public", lambda address: str(address) == "127.0.0.1")
    fetcher = ImageFetcher(private=False, most_bytes=10_000)
    assert await fetcher.fetch(f"{site}/moved") == RED
    with pytest.raises(RequestError, match="private network"):
        await fetcher.fetch(f"{site}/inside")
