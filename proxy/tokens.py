"""The tokens of the control side. A trainer's opens batches and weights, a node's the sessions of rollouts, an admin's everything there.

Of each role any number is valid at once, and a file of them is read again when it changes, so that a token is exchanged for
another without a restart: add the new one, give it to the clients, take the old one away.
"""

from __future__ import annotations

import hmac
import secrets
import time
from collections.abc import Callable, Iterator
from enum import StrEnum

from pydantic import SecretStr

from proxy.auth import hash_key, session_of_key
from proxy.errors import Forbidden, Unauthorized
from proxy.settings import Settings
from proxy.token_file import TokenFile


class Role(StrEnum):
    ADMIN = "admin"
    TRAINER = "trainer"
    NODE = "node"


def mint_token() -> str:
    """A new token of any role."""
    return secrets.token_urlsafe(32)


class Tokens:
    """Every token that is valid now, by its sha256."""

    def __init__(self, settings: Settings, clock: Callable[[], float] = time.monotonic) -> None:
        given = (
            (Role.TRAINER, settings.trainer_token, settings.trainer_tokens, settings.trainer_token_file),
            (Role.NODE, settings.node_token, settings.node_tokens, settings.node_token_file),
            (Role.ADMIN, settings.admin_token, settings.admin_tokens, settings.admin_token_file),
        )
        self._given = [(role, digest) for role, one, more, _ in given for digest in _digests([one, *more])]
        self._files = [(role, TokenFile(path, clock)) for role, _, _, path in given if path is not None]

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


def _digests(tokens: list[SecretStr | None]) -> list[bytes]:
    return [hash_key(token.get_secret_value()) for token in tokens if token]
