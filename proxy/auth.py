"""Who may do what: session keys for model calls, two tokens for the control side.

A session key is `vb-<40 hex>-<session_id>`: it names its session, so a harness that is told nothing but a key needs no path.
The store holds its sha256 alone. It opens that session's model calls and nothing on the control side. The trainer's token
opens batches and weights; the admin's opens everything on the control side. Secrets are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping
from enum import StrEnum

from proxy.errors import Forbidden, Unauthorized
from proxy.settings import Settings

SESSION_ID = re.compile(r"(?!\.{1,2}\Z)[A-Za-z0-9._-]{1,128}\Z")
"""What a session id may be. Not "." and "..", which clients fold away in a URL path."""
SESSION_KEY = re.compile(r"vb-[0-9a-f]{40}-([A-Za-z0-9._-]{1,128})\Z")


class Role(StrEnum):
    ADMIN = "admin"
    TRAINER = "trainer"


def mint_key(session_id: str) -> tuple[str, bytes]:
    """A new key of the session and the hash to store."""
    key = f"vb-{secrets.token_hex(20)}-{session_id}"
    return key, hash_key(key)


def hash_key(key: str) -> bytes:
    """sha256 of the key: enough, as a key is 160 random bits."""
    return hashlib.sha256(key.encode()).digest()


def mint_token() -> str:
    """A new admin or trainer token."""
    return secrets.token_urlsafe(32)


def session_of_key(key: str) -> str | None:
    """The session a key claims to be of; None when it is no session key."""
    match = SESSION_KEY.match(key)
    return match.group(1) if match else None


def key_opens(key: str, key_hash: bytes) -> bool:
    return hmac.compare_digest(hash_key(key), key_hash)


def credential(headers: Mapping[str, str], query: Mapping[str, str]) -> str | None:
    """The secret a request carries, from the first of `Authorization: Bearer`, `x-api-key`, `x-goog-api-key`, `?key=`.

    `headers` must look names up regardless of case, as Starlette's do.
    """
    scheme, _, token = headers.get("authorization", "").strip().partition(" ")
    if scheme.lower() == "bearer" and token.strip():
        return token.strip()
    for name in ("x-api-key", "x-goog-api-key"):
        if secret := headers.get(name, "").strip():
            return secret
    return query.get("key", "").strip() or None


def named_session(path_session: str | None, key: str | None) -> str:
    """The session a model call is for. Raises `Unauthorized` without a session key, or when key and path disagree.

    The key itself must still be held against the session's hash with `key_opens`.
    """
    if key is None:
        raise Unauthorized("no API key: send the session's key as bearer token, x-api-key, x-goog-api-key or ?key=")
    session_id = session_of_key(key)
    if session_id is None:
        raise Unauthorized("the API key is not a session key")
    if path_session is not None and path_session != session_id:
        raise Unauthorized(f"the API key is not of session {path_session}")
    return session_id


def role_of(secret: str, settings: Settings) -> Role | None:
    """The control-side role that a secret opens. Both tokens are always compared, so that time tells nothing."""
    found: Role | None = None
    for role, token in ((Role.TRAINER, settings.trainer_token), (Role.ADMIN, settings.admin_token)):
        expected = token.get_secret_value() if token is not None else ""
        if hmac.compare_digest(secret.encode(), expected.encode()) and expected:
            found = role
    return found


def check_role(secret: str | None, needed: Role, settings: Settings) -> Role:
    """The caller's role. Raises `Unauthorized` for no or an unknown token, `Forbidden` for one that opens something else."""
    if secret is None:
        raise Unauthorized(f"no token: this needs the {needed} token as bearer token")
    role = role_of(secret, settings)
    if role is Role.ADMIN or role is needed:
        return role
    if role is not None:
        raise Forbidden(f"the {role} token does not open this; it needs the {needed} token")
    if session_of_key(secret) is not None:
        raise Forbidden("a session key opens its session's model calls and nothing on the control side")
    raise Unauthorized("the token is not known here")
