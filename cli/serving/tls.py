"""The TLS certificate of a service, renewed without a restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
import time
from pathlib import Path
from typing import TYPE_CHECKING

from cli.refusal import CommandError

if TYPE_CHECKING:
    from proxy.settings import Settings

log = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""How often the files are checked."""
SOON_SECONDS = 12 * 3600
"""How long before its end a certificate is warned of."""


class Certificate:
    """`context` serves the certificate of two PEM files. Raises `CommandError` (exit code 2) if they are not a certificate and its key."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        try:
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise CommandError(
                f"--tls-cert {cert} and --tls-key {key} cannot be used: {_explain(error)}", exit_code=2
            ) from error
        self._seen = self._stamp()
        self._fault: str | None = None
        self.check_validity()

    def check_validity(self) -> None:
        """Log once that clients will refuse the certificate for its dates, or soon will."""
        fault, before = find_fault(self._cert, time.time()), self._fault
        self._fault = fault
        if fault is not None and fault != before:
            log.warning("the certificate of %s %s: renew the file, which is reread", self._cert, fault)

    async def follow(self) -> None:
        """Serve renewed certificates to new connections. Runs until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check_validity()
            try:
                self.renew()
            except (OSError, ValueError) as error:
                log.error("keeping the previous certificate: %s cannot be used: %s", self._cert, _explain(error))

    def renew(self) -> bool:
        """Load the files if they changed; returns whether they did. Raises OSError or ValueError, and keeps the previous certificate, if
        the new one cannot be used."""
        stamp = self._stamp()
        if stamp == self._seen:
            return False
        self._seen = stamp
        # Try certificate and key together first: the context in use must not get half of a renewal.
        self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
        self._load(self.context)
        log.info("serving the renewed certificate of %s", self._cert)
        self.check_validity()
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._cert, self._key, password=_no_password)

    def _stamp(self) -> tuple[int, ...]:
        found = [path.stat() for path in (self._cert, self._key)]
        return tuple(part for each in found for part in (each.st_mtime_ns, each.st_size, each.st_ino))


def load_certificate(settings: Settings) -> Certificate | None:
    """The certificate of the settings; None for plain HTTP. Raises `CommandError`."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise CommandError("--tls-cert and --tls-key belong together: give both, or neither for plain HTTP", exit_code=2)
    return Certificate(settings.tls_cert, settings.tls_key)


def find_fault(cert: Path, now: float) -> str | None:
    """What is wrong with the dates of a PEM file's first certificate at `now`, in epoch seconds; None if nothing is, or if they cannot be
    read."""
    try:
        # The only reader of dates in the standard library.
        dates = ssl._ssl._test_decode_cert(str(cert))  # type: ignore[attr-defined]
        begins, ends = (ssl.cert_time_to_seconds(dates[name]) for name in ("notBefore", "notAfter"))
    except (OSError, ValueError, KeyError, AttributeError):
        return None
    if now >= ends:
        return f"expired on {dates['notAfter']}, and clients refuse it"
    if now < begins:
        return f"is not valid before {dates['notBefore']}, and clients refuse it"
    return f"expires on {dates['notAfter']}" if ends - now < SOON_SECONDS else None


def _no_password() -> str:
    # OpenSSL would prompt on the terminal.
    raise ValueError("the key is encrypted")


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        return "the key is not the certificate's" if mismatch else "they are not a PEM certificate and a PEM key"
    return f"{getattr(error, 'strerror', None) or error}"
