"""The page that explains the marks of the others: states of groups, causes of their end, and reasons of quarantine, each with an anchor."""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import APIRouter, Request, Response
from fastapi.routing import APIRoute

from proxy.store.run import CAUSES
from proxy.ui.rendering import page
from reconstruct.reasons import REASONS

STATES: Mapping[str, str] = {
    "waiting": "It waits for members: some are open, failed or without a reward, or were not opened yet.",
    "closing": "A member has closed and is about to enter the group.",
    "ready": "It is whole and waits for a trainer's lease.",
    "leased": "A trainer has it, until it acknowledges it, gives it back, or its lease expires.",
    "acknowledged": "A trainer has trained on it. It is never delivered again.",
    "dropped": "Its rule gave it up: no trainer gets it, and nobody has to act.",
    "dead": "It cannot be delivered. It is a dead letter until somebody retries or drops it.",
}
STATE_WORDS: Mapping[str, str] = {
    "none": "waiting",
    "announced": "closing",
    "filling": "waiting",
    "ready": "ready",
    "leased": "leased",
    "acked": "acknowledged",
    "dropped": "dropped",
    "dead": "dead",
}
"""What the store calls a group's delivery, in the words of these pages."""
MARKS: Mapping[str, str] = {
    "exported": "Trained: the token stands in a row with mask 1.",
    "lost": "In quarantine for a reason that nobody chose.",
    "quarantined": "Sampled and recorded, but never trained. Sampled tokens are exported plus quarantined ones, always.",
    "incomplete": "A call is dangling or damaged, or the outcome depends on a call that is in quarantine.",
    "truncated": "The reply that ends a trained row was cut short.",
    "all_equal": "All rewards of the group are equal: a trainer that compares its members learns nothing from them.",
}


def routes(kind: type[APIRoute]) -> APIRouter:
    router = APIRouter(prefix="/ui", route_class=kind)
    router.add_api_route("/concepts", concepts, methods=["GET"])
    return router


async def concepts(request: Request) -> Response:
    return await page(request, "concepts.html", states=STATES, causes=CAUSES, marks=MARKS, reasons=REASONS)
