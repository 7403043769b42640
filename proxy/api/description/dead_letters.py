"""Groups that are not delivered any more, for the description."""

from __future__ import annotations

from proxy.api.description.operation import PAGE, Answer, Operation
from proxy.api.description.shape import Shape


class DeadLetterShape(Shape):
    letter_id: str
    group_id: str
    session_ids: list[str]
    deliveries: int
    reason: str
    died_at: float


class DeadLetters(Shape):
    dead_letters: list[DeadLetterShape]
    cursor: str | None


class Letters(Shape):
    letters: list[str]


LETTER = {
    "letter_id": "1:g:task-7",
    "group_id": "task-7",
    "session_ids": ["a", "b"],
    "deliveries": 0,
    "reason": "incomplete: 1 of 2 members are usable",
    "died_at": 1767225700.0,
}
GROUP = {"group": "A dead letter's `letter_id`, or a group's id, or the id of a session without a group; URL-encoded."}
DEAD_LETTERS = (
    Operation(
        "get",
        "/batches/dead",
        "batches",
        "admin",
        "List dead letters",
        "Groups that are not delivered any more, newest first.",
        {200: Answer("a page", DeadLetters, {"dead_letters": [LETTER], "cursor": None})},
        parameters={**PAGE, "reason": "Only those whose reason contains this."},
    ),
    Operation(
        "post",
        "/batches/dead/{group}/retry",
        "batches",
        "admin",
        "Deliver a dead letter again",
        "As if never delivered; a group that was given up incomplete waits for its members again. 409 when a later group of its id was "
        "begun meanwhile.",
        {200: Answer("done", Letters, {"letters": ["1:g:task-7"]})},
        refusals=(404, 409),
        parameters=GROUP,
    ),
    Operation(
        "delete",
        "/batches/dead/{group}",
        "batches",
        "admin",
        "Drop a dead letter",
        "Off the list for good; its sessions stay.",
        {200: Answer("done", Letters, {"letters": ["1:g:task-7"]})},
        refusals=(404,),
        parameters=GROUP,
    ),
)
