"""The error of a command that cannot do its work, for a reason the user can fix."""

from __future__ import annotations


class CommandError(Exception):
    """Printed as one sentence on stderr, without a traceback. `exit_code` 2 is a usage error."""

    def __init__(self, sentence: str, *, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
