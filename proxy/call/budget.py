"""A session's budget: how many calls and tokens it may spend, whatever its harness does.

What is spent is counted over the records of the session's calls, so that all processes count alike. A call that the budget does not
cover is refused before its engine is asked; one that it covers in part samples so many tokens and no more. Calls under way in this
process count as calls; calls that are under way at once may together go over a budget of tokens. Reservations would prevent that and do
worse: a call may sample all that is left, so the call beside it would be refused, and end the harness's run, though both fit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from proxy.call.turn import Turn
from proxy.errors import BudgetExhausted
from proxy.store.states import SessionInfo
from proxy.timeline import CancelScope
from reconstruct.accounting import Settled
from reconstruct.records import Forest, order_key


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of a budget; None: any number."""

    calls: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None

    @classmethod
    def of(cls, info: SessionInfo, forest: Forest) -> Left:
        """After the calls of `forest`. Prompts whose ids are not known count nothing."""
        sampled = asked = 0
        if info.max_completion_tokens is not None or info.max_total_tokens is not None:
            sampled = sum(len(call.node.completion_ids) for call in forest.calls.values())
            asked = sum(map(forest.prompt_length, forest.calls))
        return cls(
            None if info.max_calls is None else info.max_calls - len(forest.calls),
            None if info.max_completion_tokens is None else info.max_completion_tokens - sampled,
            None if info.max_total_tokens is None else info.max_total_tokens - asked - sampled,
        )

    @property
    def spent(self) -> str:
        """The first budget of which nothing is left, "" while there is something of each."""
        parts = {
            "max_calls": self.calls,
            "max_completion_tokens": self.completion_tokens,
            "max_total_tokens": self.total_tokens,
        }
        return next((name for name, left in parts.items() if left is not None and left < 1), "")


def check_budget(turn: Turn, before: Iterable[CancelScope]) -> None:
    """Raises BudgetExhausted where the call is not covered. `before`: the session's calls that entered this process earlier and are
    still under way: of calls that come at once the first ones are covered."""
    info, forest = turn.tree.info, turn.tree.forest
    left = Left.of(info, forest)
    earlier = sum(scope.choices for scope in before if scope.call_id not in forest.calls)
    if left.calls is not None and left.calls < earlier + turn.request.n:
        raise _exhausted(info, "max_calls")
    if left.spent:
        raise _exhausted(info, left.spent)


def fit_budget(turn: Turn, sampling: dict[str, Any], prompt_length: int = 0) -> None:
    """Clamp max_tokens to what the budget leaves beside the prompt. Raises BudgetExhausted where that is nothing."""
    info = turn.tree.info
    left = Left.of(info, turn.tree.forest)
    rooms = {"max_completion_tokens": left.completion_tokens}
    rooms["max_total_tokens"] = None if left.total_tokens is None else left.total_tokens - prompt_length * turn.request.n
    for name, room in rooms.items():
        if room is not None:
            if room < turn.request.n:
                raise _exhausted(info, name)
            share = room // turn.request.n
            sampling["max_tokens"] = min(sampling.get("max_tokens") or share, share)


def find_room(turn: Turn) -> int | None:
    """How many tokens the call's prompts and replies may have together; None: any number."""
    info = turn.tree.info
    return None if info.max_total_tokens is None else Left.of(info, turn.tree.forest).total_tokens


def exhaust_total(turn: Turn) -> BudgetExhausted:
    """The error for a prompt that leaves nothing of the budget."""
    return _exhausted(turn.tree.info, "max_total_tokens")


def cut_call(info: SessionInfo, settled: Settled, refused: bool) -> str | None:
    """The last call of a session that its budget ended, None for any other; `refused`: a call was refused for it. Calls that no row is of,
    such as attempts that came to nothing and candidates that were not chosen, are not the last.

    Where nobody tells of a refusal, a session whose budget is spent and whose last reply calls for another turn was ended by it."""
    if not info.has_budget:
        return None
    forest = settled.forest
    last = max((call for call in forest.calls.values() if settled.has_row(call.call_id)), key=order_key, default=None)
    if last is None:
        return None
    goes_on = last.finish_reason in ("tool_calls", "length") and bool(Left.of(info, forest).spent)
    return last.call_id if refused or goes_on else None


def _exhausted(info: SessionInfo, name: str) -> BudgetExhausted:
    return BudgetExhausted(
        f"session '{info.session_id}' has spent its budget ({name}: {getattr(info, name)}); it takes no more calls: end the run here"
    )
