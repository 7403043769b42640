"""What a trainer gets besides rows: the accounting of everything that was sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from contract.rules import Wire
from reconstruct.trajectory import Quarantined


@dataclass(frozen=True, slots=True, kw_only=True)
class AccountingView(Wire):
    """sampled_tokens = exported_tokens + quarantined tokens"""

    sampled_tokens: int
    exported_tokens: int
    quarantined: Sequence[Quarantined]
    dangling_calls: int
    """Calls whose process died while the engine was sampling."""
    complete: bool
    """No call is dangling or damaged, and no call that the outcome depends on is quarantined; roles and models that are not trained do
    not count."""
    replayed_tokens: int
    """Of a fork: tokens of replayed calls, which other sessions sampled and account for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LeasedSession(AccountingView):
    """The accounting of everything sampled in a session, delivered or not."""

    session_id: str
