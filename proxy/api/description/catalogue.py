"""Every endpoint of the service itself, in one table."""

from __future__ import annotations

from proxy.api.description.archive import ARCHIVE
from proxy.api.description.batches import BATCHES
from proxy.api.description.calls import CALLS
from proxy.api.description.dead_letters import DEAD_LETTERS
from proxy.api.description.engines import ENGINES
from proxy.api.description.harness import HARNESS
from proxy.api.description.health import HEALTH
from proxy.api.description.sessions import SESSIONS
from proxy.api.description.trajectories import TRAJECTORIES
from proxy.api.description.weights import WEIGHTS

OPERATIONS = (
    *HARNESS,
    *SESSIONS,
    *CALLS,
    *TRAJECTORIES,
    *ARCHIVE,
    *BATCHES,
    *DEAD_LETTERS,
    *WEIGHTS,
    *ENGINES,
    *HEALTH,
)
