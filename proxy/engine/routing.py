"""Which replica a session belongs to: rendezvous hashing, so that its prefix cache helps and few sessions move.

Every replica has a weight for every session, and a session prefers replicas in the order of their weights. A replica that is lost
gives each of its sessions to that session's next choice, one that is added takes over only those sessions that prefer it: about
1/n of them either way, and no session moves between two replicas that stay (Thaler and Ravishankar, "Using name-based mappings to
increase hit rates", 1998).
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from proxy.engine.replica import Replica


def preference(session_id: str, replicas: Iterable[Replica]) -> list[Replica]:
    """The replicas in the order in which the session wants them; the same for the same names, in whatever order they are given."""
    return sorted(replicas, key=lambda replica: _weight(session_id, replica.name), reverse=True)


def _weight(session_id: str, name: str) -> bytes:
    return blake2b(f"{session_id}\0{name}".encode(), digest_size=8).digest()
