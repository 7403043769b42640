"""Groups leased, acknowledged and given back, for the description."""

from __future__ import annotations

from proxy.api.batches import ExtendRequest, LeaseRequest
from proxy.api.description.dead_letters import DeadLetterShape
from proxy.api.description.operation import MSGPACK, Answer, Operation
from proxy.api.description.shape import Shape
from proxy.api.description.trajectories import ACCOUNTING, ROW, Accounting, Trajectory


class LeasedSession(Accounting):
    """What became of all that was sampled in a session, also of what is not given."""

    session_id: str


class LeasedGroupShape(Shape):
    group_id: str
    stale: bool = False
    """Only where it is so, with `stale_groups: flag`."""
    sessions: list[LeasedSession]
    trajectories: list[Trajectory]


class LeaseShape(Shape):
    lease_id: str
    expires_at: float
    weight_version: int
    """The default policy's."""
    weight_versions: dict[str, int]
    groups: list[LeasedGroupShape]


class Settled(Shape):
    lease_id: str
    groups: list[str]


class Extended(Shape):
    lease_id: str
    expires_at: float


class Batches(Shape):
    groups: dict[str, int]
    """Groups by state."""
    dead_letters: list[DeadLetterShape]


LEASE = {"lease_id": "The lease's id."}
BATCHES = (
    Operation(
        "post",
        "/batches/lease",
        "batches",
        "trainer",
        "Lease ready groups",
        f"Whole groups, oldest first, until `expires_at`. What is not acknowledged by then is given to another. {MSGPACK}",
        {
            200: Answer(
                "a batch",
                LeaseShape,
                {
                    "lease_id": "5b2f",
                    "expires_at": 1767226300.0,
                    "weight_version": 12,
                    "weight_versions": {"": 12},
                    "groups": [
                        {"group_id": "task-1", "sessions": [{"session_id": "first", **ACCOUNTING}], "trajectories": [ROW]}
                    ],
                },
            ),
            204: Answer("nothing came in time", media=""),
        },
        LeaseRequest,
        {"max_groups": 8, "max_staleness": 2, "wait_seconds": 30, "consumer": "trainer-0"},
        (404, 408, 413),
    ),
    *(
        Operation(
            "post",
            f"/batches/{{lease_id}}/{name}",
            "batches",
            "trainer",
            title,
            said,
            {200: Answer("done", Settled, {"lease_id": "5b2f", "groups": ["task-1"]})},
            refusals=(404, 409),
            parameters=LEASE,
        )
        for name, title, said in (
            ("ack", "Acknowledge a lease", "Its groups are never delivered again. May be repeated. 409 when it has expired."),
            ("nack", "Give a lease back", "Its groups are ready again, in their old place. 409 when it has expired."),
        )
    ),
    Operation(
        "post",
        "/batches/{lease_id}/extend",
        "batches",
        "trainer",
        "Hold a lease longer",
        "Moves its deadline, from now on. 409 when it has expired.",
        {200: Answer("done", Extended, {"lease_id": "5b2f", "expires_at": 1767226900.0})},
        ExtendRequest,
        {"lease_seconds": 600},
        (404, 408, 409, 413),
        LEASE,
    ),
    Operation(
        "get",
        "/batches",
        "batches",
        "trainer",
        "Groups by state",
        "And the newest dead letters.",
        {200: Answer("the numbers", Batches, {"groups": {"ready": 3, "leased": 1}, "dead_letters": []})},
    ),
)
