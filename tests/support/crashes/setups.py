"""What is there to be killed: two services on one Redis, or one service with a Redis of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tests.support.crashes.victims import EmbeddedRedisVictim, RedisVictim, ServiceVictim, Victim

Targets = Mapping[tuple[str, ...], int]


@dataclass(frozen=True)
class Setup:
    """`stores` and `services` start in this order; `targets` is what one round kills, and how often."""

    stores: list[Victim]
    services: list[ServiceVictim]
    redis_url: str
    targets: Targets


def shared(folder: Path, engine_url: str) -> Setup:
    redis = RedisVictim(folder / "redis")
    flags = ("--engine", engine_url, "--redis", redis.url)
    services = [ServiceVictim(f"proxy-{number}", folder / f"proxy-{number}", *flags) for number in range(2)]
    targets = {
        ("proxy-0",): 3,
        ("proxy-1",): 3,
        ("redis",): 4,
        ("trainer",): 3,
        ("proxy-0", "proxy-1"): 1,
        ("redis", "proxy-0"): 1,
        ("redis", "trainer"): 1,
        ("redis", "proxy-0", "proxy-1", "trainer"): 1,
    }
    return Setup([redis], services, redis.url, targets)


def embedded(folder: Path, engine_url: str) -> Setup:
    """The Redis ends with its service; killed alone, the service starts another one."""
    service = ServiceVictim("proxy-0", folder / "data", "--engine", engine_url, "--fsync", "always")
    targets = {("proxy-0",): 4, ("redis",): 4, ("trainer",): 2, ("redis", "proxy-0"): 1, ("proxy-0", "trainer"): 1}
    return Setup([EmbeddedRedisVictim(service)], [service], f"unix://{folder}/data/redis.sock", targets)
