"""Refusal: the command cannot do what was asked, for a reason the user can mend."""

from __future__ import annotations


class Refusal(Exception):
    """Becomes one sentence on stderr and the exit code; never a traceback. `exit_code` 2 means the call was misspelt."""

    def __init__(self, sentence: str, *, exit_code: int = 1) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code
