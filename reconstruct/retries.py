"""Retries: an attempt is superseded by a later one only on proof that its reply was not delivered; otherwise both stand.

Two calls are attempts at the same when they have the same request (equal digests of equal bodies) below the same parent. What a
later request says of itself proves nothing about an earlier reply: of identical requests at once, one that the engine failed comes
again with the mark of a retry, while the replies to the others were read. A call that something continues was delivered, whatever
was noted. Choices of one request (n > 1) are not retries of each other: they started together.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from reconstruct.forest import Forest
from reconstruct.records import Call

REASON = "superseded"


def superseded(forest: Forest, delivered: Container[str]) -> set[str]:
    """Ids of the calls whose retry took their place; `delivered` holds the ids of those whose answer went out whole."""
    attempts: dict[tuple[str | None, bytes], list[Call]] = {}
    for call in forest.in_order():
        attempts.setdefault((call.node.parent_id, call.digest), []).append(call)
    lost: set[str] = set()
    for calls in attempts.values():
        if len(calls) > 1:
            lost.update(_lost(forest, calls, delivered))
    return lost


def _lost(forest: Forest, calls: list[Call], delivered: Container[str]) -> Iterable[str]:
    latest = calls[-1].started_at
    for call in calls:
        undelivered = call.call_id not in delivered and not forest.children(call.call_id)
        if undelivered and call.started_at < latest:
            yield call.call_id
