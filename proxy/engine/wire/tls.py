"""TLS towards engines: which certificates are trusted, and which one the service shows."""

from __future__ import annotations

import ssl
from pathlib import Path


def build_client_tls(ca_file: Path | None, cert: Path | None) -> ssl.SSLContext | None:
    """None where nothing is set: then the system's authorities are trusted. `cert`: a PEM file with certificate and key, or a folder with
    tls.crt and tls.key. Raises ValueError, which names the file that cannot be used."""
    if ca_file is None and cert is None:
        return None
    context = ssl.create_default_context()
    if ca_file is not None:
        try:
            context.load_verify_locations(ca_file)
        except OSError as error:
            raise ValueError(f"VERBATIM_ENGINE_CA_FILE {ca_file} cannot be used: {_explain(error)}") from error
    if cert is not None:
        chain, key = (cert / "tls.crt", cert / "tls.key") if cert.is_dir() else (cert, cert)
        try:
            context.load_cert_chain(chain, key, password="")
        except (OSError, ValueError) as error:
            raise ValueError(f"VERBATIM_ENGINE_CLIENT_CERT {cert} cannot be used: {_explain(error)}") from error
    return context


def _explain(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        return "it is no PEM file of the kind, is encrypted, or its key is another's"
    return getattr(error, "strerror", None) or str(error)
