"""A session's budget: how many calls and tokens it may spend, whatever its harness does.

What is spent is counted over the records of the session's calls, and what calls under way may still spend over their intents, in the step
that writes an intent: so all processes count alike, and no budget is gone over. A call that the budget does not cover is refused before
its engine is asked; one that it covers in part samples so many tokens and no more. A call reserves as many tokens as it may sample, at most
its engine's window. One that finds too little unreserved, while there is something left, waits for the calls beside it: mostly they sample
less than they may, and a refusal would end the harness's run though both fit. A reservation stands on the intent and ends with it, or with
its process.
"""

from __future__ import annotations

from proxy.errors import BudgetExhausted
from proxy.store.states import SessionInfo, Share
from reconstruct.accounting import Settled
from reconstruct.records import Forest, order_key

LEAST_TOKENS = 256
"""A call begins beside others with this many tokens per choice, even where it may sample more."""


def count_left(info: SessionInfo, forest: Forest) -> Share:
    """What is left of the budget after the calls of `forest`. Prompts whose ids are not known count nothing."""
    sampled = asked = 0
    if info.max_completion_tokens is not None or info.max_total_tokens is not None:
        sampled = sum(len(call.node.completion_ids) for call in forest.calls.values())
        asked = sum(map(forest.prompt_length, forest.calls))
    return Share(
        None if info.max_calls is None else info.max_calls - len(forest.calls),
        None if info.max_completion_tokens is None else info.max_completion_tokens - sampled,
        None if info.max_total_tokens is None else info.max_total_tokens - asked - sampled,
    )


def find_spent(left: Share) -> str:
    """The first budget of which nothing is left, "" while there is something of each."""
    parts = {"max_calls": left.calls, "max_completion_tokens": left.completion_tokens, "max_total_tokens": left.total_tokens}
    return next((name for name, amount in parts.items() if amount is not None and amount < 1), "")


def claim_share(
    info: SessionInfo, n: int, max_tokens: int | None, left: Share, held: Share, window: int | None
) -> Share | None:
    """What a call of `n` choices reserves of what is `left` beside what calls under way have `held`; None: too little, for the time being.
    `window`: the most tokens that a prompt and its reply have together. Raises BudgetExhausted where the call is not covered, whatever
    becomes of the others; calls under way are calls whatever becomes of them."""
    if left.calls is not None and left.calls - (held.calls or 0) < n:
        raise _explain_exhausted(info, "max_calls")
    if spent := find_spent(left):
        raise _explain_exhausted(info, spent)
    asked = [each for each in (max_tokens, window) if each]
    sampled = _claim(left.completion_tokens, held.completion_tokens, n, min(asked, default=None), LEAST_TOKENS)
    total = _claim(left.total_tokens, held.total_tokens, n, window, None)
    return None if 0 in (sampled, total) else Share(n, sampled, total)


def _claim(left: int | None, held: int | None, n: int, wanted: int | None, least: int | None) -> int | None:
    """How many tokens `n` choices reserve that want so many each (None: all), 0 if not even the `least` (None: what is wanted) is free."""
    if left is None:
        return None
    most = left if wanted is None else min(left, n * wanted)
    free = left - (held or 0)
    return min(most, free) if free >= (most if least is None else min(most, n * least)) else 0


def find_rooms(info: SessionInfo, granted: Share, n: int, prompt_length: int) -> list[int]:
    """How many tokens each of `n` choices may have, by each budget of which the call reserved `granted`. Raises BudgetExhausted where that
    is none."""
    left = {"max_completion_tokens": granted.completion_tokens}
    left["max_total_tokens"] = None if granted.total_tokens is None else granted.total_tokens - prompt_length * n
    for name, tokens in left.items():
        if tokens is not None and tokens < n:
            raise _explain_exhausted(info, name)
    return [tokens // n for tokens in left.values() if tokens is not None]


def exhaust_total(info: SessionInfo) -> BudgetExhausted:
    """The error for a prompt that leaves nothing of the budget."""
    return _explain_exhausted(info, "max_total_tokens")


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
    goes_on = last.finish_reason in ("tool_calls", "length") and bool(find_spent(count_left(info, forest)))
    return last.call_id if refused or goes_on else None


def _explain_exhausted(info: SessionInfo, name: str) -> BudgetExhausted:
    return BudgetExhausted(
        f"session '{info.session_id}' has spent its budget ({name}: {getattr(info, name)}); it takes no more calls: end the run here"
    )
