"""Engines whose URL is https: a certificate authority of one's own, and a certificate that the service shows."""

from __future__ import annotations

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from proxy.engine.wire.channels import CannotConnect
from proxy.engine.wire.connections import open_channels, open_session
from proxy.settings import Settings
from tests.support.service.authority import Authority


class Engine(ThreadingHTTPServer):
    def handle_error(self, *_: Any) -> None:
        """Handshakes fail here, as they should."""


class Answers(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"ok")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours", "ours")


@pytest.fixture(scope="module")
def url(ours: Authority) -> Iterator[str]:
    """An engine that asks for a certificate of our authority."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*ours.issue("engine"))
    context.load_verify_locations(ours.file)
    context.verify_mode = ssl.CERT_REQUIRED
    with Engine(("127.0.0.1", 0), Answers) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"https://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


async def ask_both_ways(url: str, settings: Settings) -> list[bytes]:
    """What calls get, and what probes and weight pushes get."""
    channels = open_channels(settings)
    try:
        found = [(await channels.ask(f"{url}/health", None)).body]
    finally:
        channels.close()
    async with open_session(settings) as session, session.get(f"{url}/health") as response:
        return [*found, await response.read()]


def joined(file: Path, *parts: Path) -> Path:
    file.write_bytes(b"".join(part.read_bytes() for part in parts))
    return file


def mounted(folder: Path, cert: Path, key: Path) -> Path:
    """As Kubernetes mounts a Secret of TLS."""
    folder.mkdir()
    (folder / "tls.crt").write_bytes(cert.read_bytes())
    (folder / "tls.key").write_bytes(key.read_bytes())
    return folder


async def test_an_engine_of_ones_own_authority_is_reached_with_a_certificate(url: str, ours: Authority, tmp_path: Path) -> None:
    cert, key = ours.issue("service")
    for place in (joined(tmp_path / "both.pem", cert, key), mounted(tmp_path / "secret", cert, key)):
        settings = Settings(engine_ca_file=ours.file, engine_client_cert=place)
        assert await ask_both_ways(url, settings) == [b"ok", b"ok"]


async def test_an_authority_that_is_not_known_is_not_trusted(url: str, tmp_path: Path) -> None:
    stranger = Authority(tmp_path / "stranger", "stranger")
    for settings in (Settings(), Settings(engine_ca_file=stranger.file)):
        with pytest.raises(CannotConnect):
            await ask_both_ways(url, settings)
        with pytest.raises(aiohttp.ClientConnectorCertificateError):
            async with open_session(settings) as session:
                await session.get(f"{url}/health")


def test_files_that_cannot_be_used_stop_the_start_and_are_named(ours: Authority, tmp_path: Path) -> None:
    cert, key = ours.issue("service")
    other = ours.issue("other")[1]
    broken = tmp_path / "broken"
    broken.write_text("none")
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"engine_ca_file": tmp_path / "absent"}, "absent cannot be used: No such file"),
        ({"engine_ca_file": broken}, "broken cannot be used"),
        ({"engine_client_cert": cert}, "its key"),
        ({"engine_client_cert": key}, "no PEM file of the kind"),
        ({"engine_client_cert": tmp_path}, "cannot be used: No such file"),
        ({"engine_client_cert": joined(tmp_path / "mixed.pem", cert, other)}, "mixed.pem cannot be used"),
    )
    for fields, says in refused:
        with pytest.raises(ValidationError, match=says):
            Settings(**fields)
