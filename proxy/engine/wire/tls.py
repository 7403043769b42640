"""TLS towards engines: which certificates are trusted, and which one the service shows."""

from __future__ import annotations

import ssl
from pathlib import Path


def build_client_tls(ca_file: Path | None, cert: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """None where nothing is set: then the system's authorities are trusted. Raises ValueError, which names the file that cannot be used."""
    if ca_file is None and cert is None and key is None:
        return None
    if (cert is None) != (key is None):
        raise ValueError(
            "a client certificate and its key belong together: set VERBATIM_ENGINE_CLIENT_CERT and VERBATIM_ENGINE_CLIENT_KEY"
        )
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise ValueError(f"VERBATIM_ENGINE_CA_FILE {ca_file} cannot be used: {_explain(error)}") from error
    if cert is not None:
        try:
            context.load_cert_chain(cert, key, password="")
        except (OSError, ValueError) as error:
            raise ValueError(f"the client certificate {cert} and its key {key} cannot be used: {_explain(error)}") from error
    return context


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "it is no PEM file of the kind, is encrypted, or is not the other's"
    return getattr(error, "strerror", None) or str(error)
