"""Session keys, and where a request carries its secret.

A session key is `vb-<40 hex>-<session_id>`: it names its session, so a harness that is given only a key needs no path.
The store holds its sha256 alone. It opens that session's model calls while the session is open, and nothing on the control
side, which has its own tokens (`proxy.auth`). Secrets are compared in constant time.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import math
import re
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol
from urllib.parse import urlsplit

from proxy.errors import Forbidden, RequestError, Unauthorized

if TYPE_CHECKING:
    from pydantic import SecretStr

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
    """Raises RequestError where a header that carries a secret comes twice: a proxy in between may have checked the other one."""
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


# Tokens of the control side. A trainer's opens batches and weights, a node's the rollouts that the node has, an admin's everything.
# Each role may have several valid tokens at once, and token files are reread when they change, so a token can be exchanged without a
# restart.


class Role(StrEnum):
    ADMIN = "admin"
    TRAINER = "trainer"
    NODE = "node"


def mint_token() -> str:
    """A new token of any role."""
    return secrets.token_urlsafe(32)


class TokenSource(Protocol):
    """A token by itself, in a file, or both: `proxy.settings.GivenToken`."""

    @property
    def token(self) -> SecretStr | None: ...

    @property
    def file(self) -> Path | None: ...


class Tokens:
    """Every token that is valid now, by its sha256."""

    def __init__(self, given: Mapping[Role, TokenSource], clock: Callable[[], float] = time.monotonic) -> None:
        self._given = [(role, hash_key(each.token.get_secret_value())) for role, each in given.items() if each.token]
        self._files = [(role, TokenFile(each.file, clock)) for role, each in given.items() if each.file is not None]

    def roles_of(self, secret: str) -> set[Role]:
        """The roles that a secret opens. All tokens are always compared, so that time tells nothing, nor does their length."""
        digest = hash_key(secret)
        return {role for role, expected in self._all() if hmac.compare_digest(digest, expected)}

    def digests_of(self, role: Role) -> list[bytes]:
        """sha256 of every token of the role."""
        return [digest for given, digest in self._all() if given is role]

    def _all(self) -> Iterator[tuple[Role, bytes]]:
        yield from self._given
        for role, file in self._files:
            for digest in file.digests():
                yield role, digest

    def check(self, secret: str | None, needed: Role) -> Role:
        """The caller's role. Raises `Unauthorized` for no or an unknown token, `Forbidden` for one that opens something else."""
        if secret is None:
            raise Unauthorized(f"no token: this needs the {needed} token as bearer token")
        roles = self.roles_of(secret)
        for role in (Role.ADMIN, needed):
            if role in roles:
                return role
        if roles:
            raise Forbidden(f"the {' or '.join(sorted(roles))} token does not open this; it needs the {needed} token")
        if session_of_key(secret) is not None:
            raise Forbidden("a session key opens its session's model calls and nothing on the control side")
        raise Unauthorized("the token is not known here")


# Token files.


log = logging.getLogger(__name__)

CHECK_SECONDS = 1.0
"""How soon a changed token file counts."""


class TokenFile:
    """The tokens in a file, as they are now. One that cannot be read any more leaves them as they were; an empty one opens nothing."""

    def __init__(self, path: Path, clock: Callable[[], float]) -> None:
        self._path = path
        self._clock = clock
        self._looked_at = -math.inf
        self._stamp: tuple[int, ...] = ()
        self._digests: list[bytes] = []
        self._complained = False

    def digests(self) -> list[bytes]:
        """sha256 of each token."""
        if self._clock() - self._looked_at >= CHECK_SECONDS:
            self._looked_at = self._clock()
            try:
                self._look()
                self._complained = False
            except (OSError, ValueError) as error:
                if not self._complained:
                    log.error("the tokens of %s stay as they were: %s", self._path, getattr(error, "strerror", None) or error)
                self._complained = True
        return self._digests

    def _look(self) -> None:
        found = self._path.stat()
        stamp = (found.st_mtime_ns, found.st_size, found.st_ino)
        if stamp != self._stamp:
            self._digests = [hash_key(token) for token in tokens_in(self._path)]
            self._stamp = stamp


def tokens_in(path: Path) -> list[str]:
    """The tokens in a file: its lines, except empty ones and those that begin with #. Raises ValueError when it cannot be read."""
    try:
        lines = [line.strip() for line in path.read_text("utf-8").splitlines()]
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from error
    found = [line for line in lines if line and not line.startswith("#")]
    for token in found:
        check_token(token)
    return found


def token_in(path: Path) -> str:
    """The only token in a file. Raises ValueError when there is none, or more."""
    found = tokens_in(path)
    if len(found) != 1:
        raise ValueError("it does not hold one key")
    return found[0]


def check_token(token: str) -> None:
    """Raises ValueError for what cannot be sent as a bearer token."""
    # Anything else does not arrive as it was sent, or is cut at the blank.
    if not re.fullmatch(r"[!-~]*", token):
        raise ValueError("a token is made of ASCII letters, digits and signs, without blanks")


# Loopback: where an open service may listen, and which requests it then accepts without a secret.


def is_loopback(host: str) -> bool:
    """Whether the name or address is this machine's own and cannot be another's."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def check_local(headers: Mapping[str, str]) -> None:
    """Raise `Forbidden` unless a request without a secret, to a service that is open to this machine, can have come from a program
    on it.

    A web page that the machine's browser shows reaches loopback too: it says its own address in `Origin`, or, when its name was
    made to point here, in `Host`. Pages of other ports of the machine are others' pages.
    """
    origin, host = headers.get("origin"), headers.get("host", "")
    own = _address(f"//{host}", "")
    if not is_loopback(own[0]):
        raise Forbidden(_NOT_LOCAL)
    if origin is not None:
        scheme = origin.partition(":")[0]
        named, port = _address(origin, scheme)
        if not is_loopback(named) or port != _address(f"//{host}", scheme)[1]:
            raise Forbidden(_NOT_LOCAL)


_NOT_LOCAL = "this service is open to programs on its own machine alone, not to web pages and other names"


def check_same_site(headers: Mapping[str, str], public_url: str | None) -> None:
    """Raise `Forbidden` for a form that a page of another site sends: what is logged in by it is not what its user means.

    A browser names the page's address in `Origin`; the service's own is what the request calls it, or `public_url`."""
    origin = headers.get("origin")
    if origin is None or headers.get("sec-fetch-site") == "same-origin":
        return
    scheme = origin.partition(":")[0]
    own = [_address(f"//{headers.get('host', '')}", scheme), *([_address(public_url, scheme)] if public_url else [])]
    if _address(origin, scheme) not in own:
        raise Forbidden("the form was sent by a page of another site (behind a gateway set VERBATIM_PUBLIC_URL)")


def _address(url: str, scheme: str) -> tuple[str, int]:
    """Host and port; ("", 0) for what has none, such as the origin "null"."""
    try:
        parts = urlsplit(url)
        return (parts.hostname, parts.port or (443 if scheme == "https" else 80)) if parts.hostname else ("", 0)
    except ValueError:
        return "", 0
