"""What one process holds: built once by `create_app`, handed to the flow and to the control API."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from proxy.auth import Tokens
    from proxy.call.cache import SessionCache
    from proxy.call.hooks import CallHook
    from proxy.call.http import BodyRoom, CallRate, CallSlots
    from proxy.call.peers import Peers
    from proxy.engine.apis.renderer import LocalRenderer
    from proxy.engine.pool.pool import EnginePool
    from proxy.engine.weights.push import WeightUpdater
    from proxy.limits import ProcessLimits
    from proxy.metrics import Metrics
    from proxy.outbound import Outbound
    from proxy.projects import Projects
    from proxy.scoring.waiting import AwaitedScores
    from proxy.settings import Settings
    from proxy.store.archive import ArchiveStore
    from proxy.store.delivery import DeliveryStore
    from proxy.store.media import MediaStore
    from proxy.store.scores import ScoreStore
    from proxy.store.service import EngineStore, LogOuts, RedisClock, WeightStore
    from proxy.store.sessions import SessionStore
    from proxy.timeline import Inflight


@dataclass(slots=True)
class Services:
    settings: Settings
    limits: ProcessLimits
    tokens: Tokens
    slots: CallSlots
    rate: CallRate
    body_room: BodyRoom
    sessions: SessionStore
    clock: RedisClock
    delivery: DeliveryStore
    weights: WeightStore
    engines: EngineStore
    archive: ArchiveStore
    media: MediaStore
    scores: ScoreStore
    pool: EnginePool
    renderer: LocalRenderer
    updater: WeightUpdater
    cache: SessionCache
    inflight: Inflight
    peers: Peers
    metrics: Metrics
    outbound: Outbound
    hooks: Sequence[CallHook]
    """What joins calls, in this order: a reply that is replayed has no candidates, and images belong to the one that is chosen."""
    log_outs: LogOuts
    projects: Projects
    scoring: AwaitedScores = field(init=False)
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the service begins to stop: whoever only waits stops waiting."""
