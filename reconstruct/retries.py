"""Retries: a call is superseded by a later one only on proof, otherwise both stand.

Proof is the same request (equal digests of equal bodies, below the same parent) and either the retry's own mark or that the
earlier reply was never delivered. A call that something continues was delivered, whatever the marks say. Choices of one request
(n > 1) are not retries of each other: they started together.
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
    latest_marked = max((call.started_at for call in calls if call.marks.get("retry")), default=float("-inf"))
    for call in calls:
        if forest.children(call.call_id):
            continue
        undelivered = call.call_id not in delivered and call.started_at < latest
        if undelivered or call.started_at < latest_marked:
            yield call.call_id
