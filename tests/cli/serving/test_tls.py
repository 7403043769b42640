"""HTTPS by `verbatim serve` itself: with one process and several, with a renewed certificate, and refused when it cannot be."""

from __future__ import annotations

import datetime
import ipaddress
import os
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from cli.serving.tls import Certificate, find_fault
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.verbatim_process import ADMIN, Serving, verbatim, wait_until

NOWHERE = ("--engine", "http://127.0.0.1:9")


def make(folder: Path, name: str = "127.0.0.1", password: bytes | None = None) -> tuple[Path, Path]:
    """PEM files of a certificate that signs itself and of its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    now = datetime.datetime.now(datetime.UTC)
    signed = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    folder.mkdir(exist_ok=True)
    hidden = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    cert_file, key_file = folder / "tls.crt", folder / "tls.key"
    cert_file.write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    key_file.write_bytes(key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hidden))
    return cert_file, key_file


@pytest.mark.parametrize(
    ("days", "says"), [(0.0, None), (1.2, "expired on "), (-1.0, "is not valid before "), (0.9, "expires on ")]
)
def test_a_certificate_out_of_its_time_is_warned_of_once(
    tmp_path: Path, days: float, says: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The service started with an expired one in silence, and clients could not say why they failed."""
    cert, key = make(tmp_path)
    now = time.time() + days * 86400
    monkeypatch.setattr("cli.serving.tls.time.time", lambda: now)
    Certificate(cert, key).check_validity()
    warnings = [record.getMessage() for record in caplog.records]
    assert len(warnings) == (0 if says is None else 1)
    assert says is None or (f"the certificate of {cert} {says}" in warnings[0] and "renew the file" in warnings[0])


def test_a_file_whose_dates_cannot_be_read_is_not_judged(tmp_path: Path) -> None:
    (tmp_path / "tls.crt").write_text("none")
    assert find_fault(tmp_path / "tls.crt", 0.0) is None
    assert find_fault(tmp_path / "absent", 0.0) is None


def flags(cert: Path, key: Path) -> tuple[str, ...]:
    return "--tls-cert", str(cert), "--tls-key", str(key)


@pytest.fixture(scope="module")
def engine() -> Iterator[ScriptedEngine]:
    with ScriptedEngine("qwen3") as engine:
        yield engine


@pytest.fixture(scope="module")
def certified(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def https(engine: ScriptedEngine, certified: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    """A service of one process."""
    data = tmp_path_factory.mktemp("https") / "data"
    with Serving("--engine", engine.url, *flags(*certified), data_dir=data) as service:
        yield service
        assert service.stop() == 0
        assert "Traceback" not in service.stderr


@pytest.fixture
def trust(certified: tuple[Path, Path]) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=certified[0])


def check_service(service: Serving, trust: ssl.SSLContext) -> None:
    """It speaks with whoever trusts its certificate, and with nobody else."""
    assert service.url.startswith("https://127.0.0.1:")
    headers = {"Authorization": f"Bearer {ADMIN}"}
    with httpx.Client(verify=trust, base_url=service.control_url, headers=headers, timeout=120) as client:
        made = client.post("/sessions", json={}).json()
        assert made["base_urls"]["openai"].startswith(service.url)
        models = client.get(f"{made['base_urls']['openai']}/models", headers={"Authorization": f"Bearer {made['api_key']}"})
        assert models.status_code == 200
    for url in (service.url, service.control_url):
        with pytest.raises(httpx.ConnectError, match="certificate"):
            httpx.get(url + "/healthz")
        with pytest.raises(httpx.HTTPError):
            httpx.get(url.replace("https://", "http://") + "/healthz")


def test_a_client_that_trusts_the_certificate_is_served_over_https(https: Serving, trust: ssl.SSLContext) -> None:
    check_service(https, trust)


def test_workers_serve_over_https_on_both_ports(certified: tuple[Path, Path], trust: ssl.SSLContext, tmp_path: Path) -> None:
    with Serving(*NOWHERE, *flags(*certified), "--control-port", "0", "--workers", "2", data_dir=tmp_path / "data") as service:
        check_service(service, trust)
        assert service.stop() == 0
        assert "Traceback" not in service.stderr


@pytest.mark.parametrize("stream", [False, True])
def test_what_went_out_over_https_is_noted_as_delivered(https: Serving, trust: ssl.SSLContext, stream: bool) -> None:
    headers, body = {"Authorization": f"Bearer {ADMIN}"}, {"messages": [{"role": "user", "content": "q"}], "stream": stream}
    with httpx.Client(verify=trust, base_url=https.url, timeout=60) as client:
        made = client.post("/sessions", json={}, headers=headers).json()
        url, own = f"{made['base_urls']['openai']}/chat/completions", {"Authorization": f"Bearer {made['api_key']}"}
        for _ in range(2):
            assert client.post(url, json={"model": "policy", **body}, headers=own).status_code == 200

        def delivered() -> list[bool]:
            calls = client.get(f"/sessions/{made['session_id']}/calls", headers=headers).json()["calls"]
            return [call["delivered"] for call in calls]

        wait_until(lambda: delivered() == [True, True], 60, "both deliveries are noted")


def test_old_versions_of_tls_are_not_spoken(tmp_path: Path) -> None:
    context = Certificate(*make(tmp_path / "tls")).context
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2


def test_a_client_that_begins_no_handshake_keeps_nobody_else_waiting(https: Serving, trust: ssl.SSLContext) -> None:
    parts = urlsplit(https.url)
    with socket.create_connection((parts.hostname, parts.port), timeout=120):
        assert httpx.get(https.url + "/healthz", verify=trust, timeout=120).status_code == 200


def test_a_renewed_certificate_is_taken_up_and_half_a_renewal_is_not(tmp_path: Path) -> None:
    cert, key = make(tmp_path / "tls")
    certificate = Certificate(cert, key)
    assert not certificate.renew()
    first = shown(certificate)
    new_cert, new_key = make(tmp_path / "new")
    replace(cert, new_cert)
    with pytest.raises(ssl.SSLError):
        certificate.renew()
    assert shown(certificate) == first
    replace(key, new_key)
    assert certificate.renew()
    assert shown(certificate) == ssl.PEM_cert_to_DER_cert(new_cert.read_text()) != first


def replace(file: Path, renewed: Path) -> None:
    """A second later: within a tick of the system's clock two writes leave the same time."""
    before = file.stat().st_mtime_ns
    file.write_bytes(renewed.read_bytes())
    os.utime(file, ns=(before, before + 1_000_000_000))


def shown(certificate: Certificate) -> bytes | None:
    """What a client is shown that connects now."""
    trust_all = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    trust_all.check_hostname, trust_all.verify_mode = False, ssl.CERT_NONE
    ours, theirs = (ssl.MemoryBIO(), ssl.MemoryBIO())
    client = trust_all.wrap_bio(ours, theirs)
    server = certificate.context.wrap_bio(theirs, ours, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    return client.getpeercert(binary_form=True)


def test_what_is_no_certificate_with_its_key_is_refused_in_one_sentence(tmp_path: Path) -> None:
    cert, key = make(tmp_path / "tls")
    _, other = make(tmp_path / "other")
    _, hidden = make(tmp_path / "hidden", password=b"secret")
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    nowhere = tmp_path / "nowhere.pem"
    refused: dict[str, list[tuple[Any, ...]]] = {
        "belong together": [("--tls-cert", str(cert)), ("--tls-key", str(key))],
        "not the certificate's": [flags(cert, other)],
        "encrypted": [flags(cert, hidden)],
        "not a PEM certificate": [flags(empty, key), flags(cert, empty)],
        "No such file": [flags(nowhere, key), flags(cert, nowhere)],
    }
    for words, cases in refused.items():
        for case in cases:
            ended = verbatim("serve", *NOWHERE, "--port", "0", "--data-dir", str(tmp_path / "data"), *case)
            assert ended.returncode == 2, ended.stderr
            assert words in ended.stderr and ended.stderr.count("\n") <= 2 and "Traceback" not in ended.stderr
