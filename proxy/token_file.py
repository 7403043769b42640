"""A file of tokens: read when the service starts, and again when it changes."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path

from proxy.auth import hash_key

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


def check_token(token: str) -> None:
    """Raises ValueError for what cannot be sent as a bearer token."""
    # Anything else does not arrive as it was sent, or is cut at the blank.
    if not re.fullmatch(r"[!-~]*", token):
        raise ValueError("a token is made of ASCII letters, digits and signs, without blanks")
