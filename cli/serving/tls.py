"""The TLS certificate of a service, renewed without a restart."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from cli.refusal import Refusal

if TYPE_CHECKING:
    from proxy.settings import Settings

log = logging.getLogger(__name__)

CHECK_SECONDS = 10.0
"""How often the files are checked."""


class Certificate:
    """`context` serves the certificate of two PEM files. Raises `Refusal` (exit code 2) if they are not a certificate and its key."""

    def __init__(self, cert: Path, key: Path) -> None:
        self._cert, self._key = cert, key
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        try:
            self._load(self.context)
        except (OSError, ValueError) as error:
            raise Refusal(f"--tls-cert {cert} and --tls-key {key} cannot be used: {_explain(error)}", exit_code=2) from error
        self._seen = self._stamp()

    async def follow(self) -> None:
        """Serve renewed certificates to new connections. Runs until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
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
        return True

    def _load(self, context: ssl.SSLContext) -> None:
        context.load_cert_chain(self._cert, self._key, password=_no_password)

    def _stamp(self) -> tuple[int, ...]:
        found = [path.stat() for path in (self._cert, self._key)]
        return tuple(part for each in found for part in (each.st_mtime_ns, each.st_size, each.st_ino))


def load_certificate(settings: Settings) -> Certificate | None:
    """The certificate of the settings; None for plain HTTP. Raises `Refusal`."""
    if settings.tls_cert is None and settings.tls_key is None:
        return None
    if settings.tls_cert is None or settings.tls_key is None:
        raise Refusal("--tls-cert and --tls-key belong together: give both, or neither for plain HTTP", exit_code=2)
    return Certificate(settings.tls_cert, settings.tls_key)


def _no_password() -> str:
    # OpenSSL would prompt on the terminal.
    raise ValueError("the key is encrypted")


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        mismatch = "KEY_VALUES_MISMATCH" in str(error)
        return "the key is not the certificate's" if mismatch else "they are not a PEM certificate and a PEM key"
    return f"{getattr(error, 'strerror', None) or error}"
