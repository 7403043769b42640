"""Session keys, and where a request carries its secret.

A session key is `vb-<40 hex>-<session_id>`: it names its session, so a harness that is told nothing but a key needs no path.
The store holds its sha256 alone. It opens that session's model calls while the session is open, and nothing on the control
side, which has tokens of its own (`proxy.tokens`). Secrets are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence

from proxy.errors import RequestError, Unauthorized

SESSION_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")
"""What a session id may be. Not "." and "..", which clients fold away in a URL path."""
SESSION_KEY = re.compile(r"vb-[0-9a-f]{40}-([A-Za-z0-9._-]{1,128})\Z")


_KEYS = ("x-api-key", "x-goog-api-key", "api-key")
"""Headers that carry a secret and nothing else."""


def mint_key(session_id: str) -> tuple[str, bytes]:
    """A new key of the session and the hash to store."""
    key = f"vb-{secrets.token_hex(20)}-{session_id}"
    return key, hash_key(key)


def hash_key(key: str) -> bytes:
    """sha256 of the key: enough, as a key is 160 random bits."""
    return hashlib.sha256(key.encode()).digest()


def session_of_key(key: str) -> str | None:
    """The session a key claims to be of; None when it is no session key."""
    match = SESSION_KEY.match(key)
    return match.group(1) if match else None


def key_opens(key: str, key_hash: bytes) -> bool:
    return hmac.compare_digest(hash_key(key), key_hash)


def check_once(headers: Sequence[tuple[bytes, bytes]]) -> None:
    """Raises RequestError where a header that carries a secret comes twice: whoever stands in between may have looked at the other."""
    names = [name.lower() for name, _ in headers]
    for name in (b"authorization", *(header.encode() for header in _KEYS)):
        if names.count(name) > 1:
            raise RequestError(f"the request has {names.count(name)} {name.decode()} headers: send one")


def credential(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """The secret a request carries, from the first of `Authorization: Bearer`, `x-api-key`, `x-goog-api-key`, `api-key`, `?key=`.

    `headers` must look names up regardless of case, as Starlette's do.
    """
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for name in _KEYS:
        if secret := headers.get(name, "").strip():
            return secret
    return query.get("key", "").strip() or None


def named_session(path_session: str | None, key: str | None, *, keyless: bool = False) -> str:
    """The session a model call is for. Raises `Unauthorized` without a session key, or when key and path disagree.

    The key itself must still be held against the session's hash with `key_opens`. `keyless`: the path alone will do.
    """
    session_id = session_of_key(key) if key is not None else None
    if session_id is None and keyless and path_session is not None:
        return path_session
    if key is None:
        raise Unauthorized("no API key: send the session's key as bearer token, x-api-key, x-goog-api-key or ?key=")
    if session_id is None:
        raise Unauthorized("the API key is not a session key")
    if path_session is not None and path_session != session_id:
        raise Unauthorized(f"the API key is not of session {path_session}")
    return session_id
