"""Whether the service lives and can serve a call, its numbers and its pages, for the description."""

from __future__ import annotations

from typing import Literal

from proxy.api.description.operation import Answer, Operation
from proxy.api.description.shape import Shape

PAGES = "text/html; charset=utf-8"


class Health(Shape):
    status: Literal["ok", "ready"]


class NotReady(Shape):
    status: Literal["unavailable"]
    reason: str


HEALTH = (
    Operation(
        "get",
        "/healthz",
        "health",
        "anyone",
        "Whether the process lives",
        "It asks neither the store nor an engine.",
        {200: Answer("it does", Health, {"status": "ok"})},
    ),
    Operation(
        "get",
        "/readyz",
        "health",
        "anyone",
        "Whether it can serve a call",
        "The store answers, and an engine serves.",
        {
            200: Answer("it can", Health, {"status": "ready"}),
            503: Answer(
                "it cannot",
                NotReady,
                {"status": "unavailable", "reason": "no engine serves: 127.0.0.1:8000: it was not reached yet"},
            ),
        },
    ),
    Operation(
        "get",
        "/metrics",
        "health",
        "anyone",
        "Prometheus metrics",
        "Of the answering process; the table of them is in the documentation.",
        {200: Answer("text", media="text/plain; version=0.0.4; charset=utf-8")},
    ),
    Operation(
        "get",
        "/ui",
        "health",
        "admin",
        "The pages",
        "For people: sessions, groups, trees and tokens. A browser without a token gets the page to log in at.",
        {
            200: Answer("the first page", media=PAGES),
            400: Answer("a page that says what is wrong", media=PAGES),
            401: Answer("the page to log in at", media=PAGES),
            403: Answer("the same, for a token of another role", media=PAGES),
            503: Answer("a page that says that the store is away", media=PAGES),
        },
    ),
)
