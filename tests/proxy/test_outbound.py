"""Requests to URLs that callers name: each connection is judged by the address that it goes to, and answers are bounded."""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import pytest
from pydantic import ValidationError

from proxy.addresses import AllowList, is_public
from proxy.outbound import ANSWER_BYTES, Outbound, OutboundFailed
from proxy.settings import Settings

REFUSED = "is no address that this service may call"
SECONDS = 60.0


class Site(ThreadingHTTPServer):
    """Answers POSTs; `asked` has the path and body of each."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.asked: list[tuple[str, bytes]] = []
        self.silent = threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Answer(BaseHTTPRequestHandler):
    server: Site

    def do_POST(self) -> None:
        self.server.asked.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
        if self.path == "/silent":
            self.server.silent.wait()
            return
        self.send_response(307 if self.path == "/moved" else 200)
        if self.path == "/moved":
            self.send_header("location", "/here")
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(b"x" * (ANSWER_BYTES + 1) if self.path == "/long" else b"yes")

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def site() -> Iterator[Site]:
    with Site() as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.silent.set()
        server.shutdown()
        thread.join()


async def post(url: str, allowed: list[str] | None = None, *, on_loopback: bool = False) -> tuple[int, bytes]:
    return await Outbound(allowed, on_loopback=on_loopback).post(url, b"{}", {}, seconds=SECONDS)


FULL_WIDTH = "\uff11\uff12\uff17.\uff10.\uff10.\uff11"
CIRCLED = "\u2460\u2461\u2466.\u24ea.\u24ea.\u2460"
IDEOGRAPHIC_DOTS = "127\u30020\u30020\u30021"

LOOPBACK_HOSTS = [
    *("127.0.0.1", "127.1", "0x7f.1", "0177.0.0.1", "2130706433", "localhost", "localhost.", "LOCALHOST", "0.0.0.0"),
    *(IDEOGRAPHIC_DOTS, FULL_WIDTH, CIRCLED),
    *("[::1]", "[::ffff:127.0.0.1]", "[::ffff:7f00:1]", "[0:0:0:0:0:ffff:127.0.0.1]"),
    *("[64:ff9b::7f00:1]", "[2002:7f00:1::]", "[::127.0.0.1]"),
]


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_no_spelling_of_a_loopback_address_is_connected_to(site: Site, host: str) -> None:
    """Some spellings lead nowhere; none leads to the site."""
    with pytest.raises(OutboundFailed):
        await post(f"http://{host}:{site.server_port}/")
    assert site.asked == []


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", IDEOGRAPHIC_DOTS, FULL_WIDTH, CIRCLED])
async def test_a_refusal_names_the_address_and_the_setting(site: Site, host: str) -> None:
    with pytest.raises(OutboundFailed, match=rf"^(127\.0\.0\.1|::1) {REFUSED} \(VERBATIM_OUTBOUND_ALLOW\)"):
        await post(f"http://{host}:{site.server_port}/")


async def test_a_name_is_judged_by_the_address_that_it_leads_to(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:

    async def resolve(_: Any, host: str, port: int = 0, family: Any = socket.AF_INET) -> list[Any]:
        return [{"hostname": host, "host": "127.0.0.1", "port": port, "family": socket.AF_INET, "proto": 0, "flags": 0}]

    monkeypatch.setattr(aiohttp.ThreadedResolver, "resolve", resolve)
    with pytest.raises(OutboundFailed, match=f"127.0.0.1 {REFUSED}"):
        await post(f"http://rebound.example:{site.server_port}/")
    assert site.asked == []
    assert await post(f"http://rebound.example:{site.server_port}/", ["rebound.example"]) == (200, b"yes")


@pytest.mark.parametrize(
    ("allowed", "host"),
    [
        (["127.0.0.0/8"], "127.0.0.1"),
        (["127.0.0.0/8", "public"], FULL_WIDTH),
        (["127.0.0.1"], "[::ffff:127.0.0.1]"),
        (["LocalHost"], "localhost"),
    ],
)
async def test_what_the_operator_allows_is_called(site: Site, allowed: list[str], host: str) -> None:
    assert await post(f"http://{host}:{site.server_port}/a", allowed) == (200, b"yes")
    assert site.asked == [("/a", b"{}")]


async def test_a_list_allows_nothing_else(site: Site) -> None:
    for allowed in ([], ["public"], ["10.0.0.0/8"], ["localhost"], ["elsewhere.example"]):
        with pytest.raises(OutboundFailed, match=REFUSED):
            await post(site.url, allowed, on_loopback=True)
    assert site.asked == []


async def test_a_service_on_loopback_calls_its_own_machine_and_no_other_private_one(site: Site) -> None:
    assert await post(site.url, on_loopback=True) == (200, b"yes")
    for host in ("169.254.169.254", "10.1.2.3", "[fd00:ec2::254]"):
        with pytest.raises(OutboundFailed, match=REFUSED):
            await post(f"http://{host}:{site.server_port}/", on_loopback=True)


async def test_a_redirect_is_not_followed(site: Site) -> None:
    assert (await post(f"{site.url}/moved", on_loopback=True))[0] == 307
    assert [path for path, _ in site.asked] == ["/moved"]


async def test_an_answer_without_end_is_not_read_to_its_end(site: Site) -> None:
    with pytest.raises(OutboundFailed, match=f"more than {ANSWER_BYTES} bytes"):
        await post(f"{site.url}/long", on_loopback=True)


async def test_an_answer_that_does_not_come_is_given_up(site: Site) -> None:
    with pytest.raises(OutboundFailed, match=r"no answer within 0\.05 s"):
        await Outbound(None, on_loopback=True).post(f"{site.url}/silent", b"{}", {}, seconds=0.05)


async def test_a_proxy_of_the_environment_is_not_asked(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", site.url)
    with pytest.raises(OutboundFailed, match=REFUSED):
        await post("http://10.1.2.3:9/")
    assert site.asked == []


@pytest.mark.parametrize(
    "address",
    [
        *("0.0.0.0", "10.0.0.1", "100.64.0.1", "127.8.9.1", "169.254.169.254", "172.16.0.1", "192.168.1.1", "224.0.0.1"),
        *("255.255.255.255", "::", "::1", "::7f00:1", "fe80::1", "fc00::1", "fec0::1", "ff02::1", "2001::1", "2002:808:808::1"),
        *("64:ff9b:1::808:808", "2001:db8::1"),
    ],
)
def test_an_address_of_no_public_network_is_not_public(address: str) -> None:
    assert not is_public(ipaddress.ip_address(address))
    assert not AllowList(["public"]).admits(address)


@pytest.mark.parametrize("address", ["8.8.8.8", "2606:4700::1111", "::ffff:8.8.8.8", "64:ff9b::808:808"])
def test_a_public_address_is_public_in_each_form(address: str) -> None:
    assert AllowList(["public"]).admits(address)


@pytest.mark.parametrize("embedding", ["::ffff:{}", "64:ff9b::{}"])
def test_an_address_inside_another_is_judged_as_what_it_is(embedding: str) -> None:
    inner = embedding.format("10.1.2.3")
    assert not AllowList(["public"]).admits(inner)
    assert AllowList(["10.0.0.0/8"]).admits(inner)


@pytest.mark.parametrize("entry", ["10.0.0.0/33", "10.0.0.1/8", "300.1.1.1", "http://judge/", "", "a b", "judge:80"])
def test_an_entry_that_is_neither_network_nor_name_stops_the_start(entry: str) -> None:
    with pytest.raises(ValidationError, match="is no network"):
        Settings(outbound_allow=[entry])
