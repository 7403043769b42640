"""How many tokens a harness has: what the model's entry in the session's model list says, and how much of it a reply may have.

The service lists each model with `max_model_len`: the smallest context window, prompt and reply together, of any engine that may answer
the call; null if none reports one. Everything that starts a harness reads it there.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollout.harnesses.prepared import LIMITS

log = logging.getLogger(__name__)

REPLY_SHARE = 4
"""A reply gets at most one part in this many of the window."""
LONGEST_REPLY = 32_768


@dataclass(frozen=True, slots=True)
class Limits:
    """`window` is in tokens, prompt and reply together; None if nobody knows it. `most_sampled` are the limits in tokens that a run has for
    its replies otherwise: of each call, or of all calls."""

    window: int | None = None
    most_sampled: tuple[int, ...] = ()

    @property
    def max_output(self) -> int | None:
        """The tokens of the longest reply: a quarter of the window, at most 32,768, and never more than the run may sample anyway."""
        share = () if self.reserve is None else (self.reserve,)
        return min((*share, *self.most_sampled), default=None)

    @property
    def reserve(self) -> int | None:
        """The tokens of the window that a prompt leaves free: for a reply, and for what tools answer before the agent looks at the length
        again. A run's own limits on replies make it no smaller."""
        return None if self.window is None else min(max(1, self.window // REPLY_SHARE), LONGEST_REPLY)

    @property
    def max_input(self) -> int | None:
        """The tokens of the longest prompt."""
        return None if self.window is None or self.reserve is None else max(1, self.window - self.reserve)

    def values(self) -> dict[str, str]:
        """The placeholders that are known."""
        return {name: str(value) for name in LIMITS if (value := getattr(self, name)) is not None}


UNKNOWN = Limits()


def read_window(card: Mapping[str, Any]) -> int | None:
    """The window in a model's entry of the session's model list; None if it has none."""
    window = card.get("max_model_len")
    return window if isinstance(window, int) and window > 0 else None


def explain_unknown_window(harness: str, model: str) -> str:
    what = f"model {model!r}" if model else "the model"
    return (
        f"no engine reports the context window of {what}, so {harness} is not told it: it goes by its own default, and a longer "
        "conversation may end with an error"
    )


class UnknownWindows:
    """Logs of each harness and model once that the window is unknown."""

    def __init__(self) -> None:
        self._noted: set[tuple[str, str]] = set()

    def note(self, harness: str, model: str) -> None:
        if (harness, model) not in self._noted:
            self._noted.add((harness, model))
            log.warning(explain_unknown_window(harness, model))
