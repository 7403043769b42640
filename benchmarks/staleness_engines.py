"""Engines of the staleness simulation: replicas that decode many replies at once, the slower each the more there are.

A replica with n replies under way takes `token_seconds + n * reply_seconds` for one token of each. A reply's end is therefore known in
tokens per reply since the start, not in seconds: replies are kept by the former, and the clock is moved by the latter.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Speed:
    """`slots`: replies at once in one replica, beyond which they queue."""

    token_seconds: float
    reply_seconds: float
    slots: int

    def per_reply(self, replies: int) -> float:
        """Tokens per second of each of so many replies."""
        return 1.0 / (self.token_seconds + replies * self.reply_seconds)

    @property
    def most(self) -> float:
        """Tokens per second of a full replica."""
        return self.slots * self.per_reply(self.slots)


@dataclass(slots=True)
class Replica:
    """Replies under way as (end in tokens per reply, order, reply), and those that wait for a slot. `next_end`: when the first reply
    ends if none comes; infinite when none will. `now` is when the replica was last looked at."""

    speed: Speed
    now: float = 0.0
    decoded: float = 0.0
    sampled: float = 0.0
    busy_seconds: float = 0.0
    next_end: float = math.inf
    frozen: bool = False
    closed: bool = False
    active: list[tuple[float, int, Any]] = field(default_factory=list)
    waiting: deque[tuple[float, int, Any]] = field(default_factory=deque)

    def move_to(self, now: float) -> None:
        """Decode until `now`; no reply may end before it."""
        passed, replies = now - self.now, len(self.active)
        if replies and not self.frozen:
            tokens = passed * self.speed.per_reply(replies)
            self.decoded += tokens
            self.sampled += tokens * replies
            self.busy_seconds += passed
        self.now = now

    def add(self, tokens: float, order: int, reply: Any) -> None:
        self.waiting.append((tokens, order, reply))
        self._changed()

    def set_closed(self, closed: bool) -> None:
        """Whether replies that wait stay where they are."""
        self.closed = closed
        self._changed()

    def set_frozen(self, frozen: bool) -> None:
        """Whether nothing is decoded."""
        self.frozen = frozen
        self._changed()

    def end_one(self) -> Any:
        """The reply that ends now."""
        end, _, reply = heapq.heappop(self.active)
        self.decoded = max(self.decoded, end)
        self._changed()
        return reply

    def _changed(self) -> None:
        while self.waiting and not self.closed and len(self.active) < self.speed.slots:
            tokens, order, reply = self.waiting.popleft()
            heapq.heappush(self.active, (self.decoded + tokens, order, reply))
        self.next_end = math.inf
        if self.active and not self.frozen:
            left = max(0.0, self.active[0][0] - self.decoded)
            self.next_end = self.now + left / self.speed.per_reply(len(self.active))


class Fleet:
    """Replicas of one speed. A new reply goes to the one with the fewest."""

    def __init__(self, replicas: int, speed: Speed) -> None:
        self.replicas = [Replica(speed) for _ in range(replicas)]
        self.now = 0.0
        self._order = 0

    def start(self, tokens: float, reply: Any) -> None:
        self._order += 1
        emptiest = min(self.replicas, key=lambda replica: len(replica.active) + len(replica.waiting))
        emptiest.move_to(self.now)
        emptiest.add(tokens, self._order, reply)

    @property
    def next_end(self) -> float:
        return min([replica.next_end for replica in self.replicas])

    @property
    def drained(self) -> bool:
        return not any(replica.active for replica in self.replicas)

    def move_to(self, now: float) -> None:
        """No reply may end before `now`. A replica in which nothing happens is not looked at."""
        self.now = now

    def ended(self) -> Iterator[Any]:
        """Replies that end now, each taken out of its replica."""
        for replica in self.replicas:
            while replica.next_end <= self.now:
                replica.move_to(self.now)
                yield replica.end_one()

    def freeze(self, frozen: bool) -> None:
        for replica in self._all_moved():
            replica.set_frozen(frozen)

    def close(self, closed: bool) -> None:
        for replica in self._all_moved():
            replica.set_closed(closed)

    @property
    def sampled(self) -> float:
        return sum(replica.sampled for replica in self._all_moved())

    @property
    def busy_seconds(self) -> float:
        return sum(replica.busy_seconds for replica in self._all_moved())

    def _all_moved(self) -> list[Replica]:
        for replica in self.replicas:
            replica.move_to(self.now)
        return self.replicas
