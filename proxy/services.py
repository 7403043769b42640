"""What one process holds: built once by `create_app`, handed to the flow and to the control API."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.engine.local_renderer import LocalRenderer
    from proxy.engine.pool import EnginePool
    from proxy.engine.updates import WeightUpdater
    from proxy.inflight import Inflight
    from proxy.limits import BodyRoom, CallRate, CallSlots
    from proxy.metrics import Metrics
    from proxy.peers import Peers
    from proxy.settings import Settings
    from proxy.store.archive import RedisArchiveStore
    from proxy.store.clock import RedisClock
    from proxy.store.delivery_store import DeliveryStore
    from proxy.store.engines import EngineStore
    from proxy.store.session_store import SessionStore
    from proxy.store.weight_store import WeightStore
    from proxy.tokens import Tokens
    from proxy.trees import SessionTrees


@dataclass(slots=True)
class Services:
    settings: Settings
    tokens: Tokens
    slots: CallSlots
    rate: CallRate
    body_room: BodyRoom
    sessions: SessionStore
    clock: RedisClock
    delivery: DeliveryStore
    weights: WeightStore
    engines: EngineStore
    archive: RedisArchiveStore
    pool: EnginePool
    renderer: LocalRenderer
    updater: WeightUpdater
    trees: SessionTrees
    inflight: Inflight
    peers: Peers
    metrics: Metrics
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service begins to stop: whoever only waits stops waiting."""
