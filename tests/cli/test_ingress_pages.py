"""What commands say where an ingress answers in the place of the service, or something else does."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import httpx
import pytest

from tests.support.service.running_service import ADMIN, RunningService
from tests.support.service.verbatim_process import verbatim


@contextmanager
def answering(routed: dict[str, str], status: int, page: str = "<html><h1>nginx</h1></html>") -> Iterator[str]:
    """The URL of an ingress: paths that begin so go to the service of that URL, all others get its own page."""

    class Ingress(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            behind = next((url for path, url in routed.items() if self.path.startswith(path)), None)
            found = httpx.get(behind + self.path, headers={"Authorization": self.headers["Authorization"]}) if behind else None
            self.send_response(found.status_code if found else status)
            self.end_headers()
            self.wfile.write(found.content if found else page.encode())

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Ingress) as server:
        Thread(target=server.serve_forever, args=(0.05,)).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def ask(url: str, *command: str) -> str:
    done = verbatim(*command, VERBATIM_URL=url, VERBATIM_ADMIN_TOKEN=ADMIN)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("status", [404, 503, 200])
def test_a_path_that_an_ingress_does_not_route_is_told_from_a_service_that_is_not_there(
    service: RunningService, status: int
) -> None:
    """Both were "no Verbatim service", or `answered 503` without a cause."""
    with answering({"/healthz": service.url, "/engines": service.url}, status) as url:
        said = ask(url, "sessions", "list")
        assert f"/sessions is not served at {url} (status {status}), though a Verbatim service answers there" in said
    with answering({}, status) as url:
        said = ask(url, "sessions", "list")
        assert ("no Verbatim service did" if status == 503 else "is no Verbatim service") in said


def test_another_program_with_a_health_page_is_no_service() -> None:
    with answering({}, 200, '{"status": "ok"}') as url:
        assert f"what answers at {url}/healthz is no Verbatim service" in ask(url, "doctor")
    with answering({}, 404, '{"detail": "Not Found"}') as url:
        assert f"what answers at {url}/sessions is no Verbatim service" in ask(url, "sessions", "list")


def test_doctor_names_the_path_that_is_not_routed(service: RunningService) -> None:
    with answering({"/healthz": service.url}, 404) as url:
        said = ask(url, "doctor")
    assert f"/engines is not served at {url}" in said and "token" not in said.partition("/engines")[0].splitlines()[-1]
