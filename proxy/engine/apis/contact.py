"""EngineKinds: the installed kinds of engines, and the contact with a replica that finds out which one it is."""

from __future__ import annotations

import aiohttp

from proxy.engine.apis.base import EngineKind, IdText, IdTexts
from proxy.engine.apis.probe import PROBE_TIMEOUT, NotListening, Probe
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.routers import WORKERS, look_behind
from proxy.engine.kinds import find_kinds, load_kind
from proxy.engine.replica import Replica
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineUnavailable


class EngineKinds:
    """One object per installed kind."""

    def __init__(self, http: EngineHttp, local: LocalRenderer) -> None:
        self._http = http
        self._local = local
        self._id_texts = IdTexts()
        self._kinds: dict[str, EngineKind] = {name: load_kind(entry)(http, local) for name, entry in find_kinds().items()}

    def of(self, replica: Replica) -> EngineKind:
        """Raises EngineUnavailable for a replica that was never reached."""
        if replica.api is None:
            raise EngineUnavailable(f"engine {replica.name} was not reached yet")
        return self._kinds[replica.api]

    def takes_ids(self, name: str) -> bool:
        """False for a kind that is no longer installed."""
        return name in self._kinds and self._kinds[name].takes_ids

    def id_text(self, session_id: str) -> IdText:
        return self._id_texts.of(session_id)

    async def contact(self, replica: Replica, asked: str) -> None:
        """Find out what the replica is: models, kind (`asked`, or "auto"), weight endpoints.

        Raises EngineUnavailable with the reason it cannot serve, NotListening if no connection could be made."""
        probe, fresh = Probe(self._http.session, replica.url), not replica.alive or replica.api is None
        try:
            await probe.read_models(replica)
            await probe.check_health()
            if fresh:
                replica.forget_replies()
                kind = await self.detect(probe, asked)
                replica.version = str((await probe.read("/version")).get("version") or "")
                replica.updatable = await kind.takes_weights(probe)
                replica.logprob_mode = await kind.find_logprob_mode(probe) if replica.updatable else None
                replica.plugin = await kind.find_plugin(probe, replica)
                replica.api = kind.name
        except TimeoutError as error:
            raise EngineUnavailable(f"no answer within {PROBE_TIMEOUT.total:g} seconds") from error
        except aiohttp.ClientConnectorError as error:
            raise NotListening(f"cannot connect: {error.strerror or error.os_error}") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise EngineUnavailable(str(error) or type(error).__name__) from error
        await self.look_behind(replica, fresh=fresh, thorough=fresh)

    async def look_behind(self, replica: Replica, *, fresh: bool = False, thorough: bool = True) -> None:
        """Find out whether it is a router: see `look_behind`."""
        kind = self.of(replica)
        # Workers that lack the extension must not be asked.
        sources = [*kind.sources, WORKERS] if replica.logprob_mode is not None else kind.sources
        await look_behind(self._http, replica, sources, fresh=fresh, thorough=thorough)

    async def detect(self, probe: Probe, asked: str) -> EngineKind:
        """The kind that was asked for; with "auto" the first that fits. Raises EngineUnavailable if none does."""
        if asked != "auto":
            reason = await self._kinds[asked].detect(probe, asked=True)
            if reason is not None:
                raise EngineUnavailable(reason)
            return self._kinds[asked]
        for kind in sorted(self._kinds.values(), key=lambda kind: kind.detection_order):
            usable = self._local.is_set or not kind.needs_renderer
            if usable and await kind.detect(probe, asked=False) is None:
                return kind
        raise EngineUnavailable("it is of no known kind")
