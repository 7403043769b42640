"""EngineKinds: the installed kinds of engines, and the contact with a replica that finds out what it is.

First contact ends in one of three ways: the replica can serve and be trained on; it can serve, and a note says why what it samples is
never trained; or Unreadable says what of its answers cannot be read and the way out. For that it samples one token, as a call does.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

import aiohttp

from proxy.engine.apis.base import EngineKind
from proxy.engine.apis.evidence import WORKERS
from proxy.engine.apis.first_sample import NotReadable, read_sample, sample_token
from proxy.engine.apis.json_text import IdText, IdTexts
from proxy.engine.apis.probe import PROBE_TIMEOUT, NotListening, Probe, Unreadable
from proxy.engine.apis.renderer import LocalRenderer
from proxy.engine.apis.routers import look_behind
from proxy.engine.kinds import plugins
from proxy.engine.replica import FirstSample, Replica, parse_version
from proxy.engine.wire.http import EngineHttp
from proxy.errors import EngineBusy, EngineFailed, EngineUnavailable

SAMPLE_SECONDS = 20.0
"""For how long a visit waits for the sample. A busy engine takes longer: it serves, and is asked again."""
ASK_AGAIN_SECONDS = 15.0
"""Between two samples of an engine whose answer could not be read."""

_VERSION, _WEIGHTS, _UNREAD = "version", "weights", "unread"
"""Topics of notes."""


class EngineKinds:
    """One object per installed kind."""

    def __init__(self, http: EngineHttp, local: LocalRenderer) -> None:
        self._http = http
        self._local = local
        self.id_text: Callable[[str], IdText] = IdTexts().of
        """The remembered lists of a session, by its id."""
        self._kinds: dict[str, EngineKind] = {name: kind(http, local) for name, kind in plugins().load_all().items()}

    def of(self, replica: Replica) -> EngineKind:
        """Raises EngineUnavailable for a replica that was never reached."""
        if replica.api is None:
            raise EngineUnavailable(f"engine {replica.name} was not reached yet")
        return self._kinds[replica.api]

    def takes_ids(self, name: str) -> bool:
        """False for a kind that is no longer installed."""
        return name in self._kinds and self._kinds[name].takes_ids

    async def contact(self, replica: Replica, asked: str, logprob_mode: str = "") -> None:
        """Find out what the replica is: models, kind (`asked`, or "auto"), version, weight endpoints, and whether its answers can be
        read. Asks no more than whether it is still the same, if it was met before and has lived since. `logprob_mode`: what its
        operator says of an engine that does not say.

        Raises EngineUnavailable with the reason it cannot serve, NotListening if no connection could be made, Unreadable."""
        probe = Probe(self._http.probing, replica.url)
        with _report_failures():
            models, fresh = replica.models, not replica.alive or replica.api is None
            await probe.read_models(replica, fresh=fresh)
            await probe.check_health()
            if fresh or await self._is_another(probe, replica, models):
                before, replica.identity = replica.identity, None
                await self._meet(probe, replica, asked)
                fresh = fresh or replica.identity != before
                if fresh or replica.sample.failed:
                    replica.sample = FirstSample()
                    replica.forget_replies()
            if replica.cards and replica.loads_adapters is None:
                replica.loads_adapters = await self.of(replica).loads_adapters(probe)
        await self.look_behind(replica, fresh=fresh, thorough=fresh)
        await self._read_sample(replica, logprob_mode)

    async def sample_token(self, replica: Replica) -> None:
        """Sample one token that belongs to no call, to see that the engine samples. Raises as `EngineKind.sample`."""
        await sample_token(self.of(replica), replica)

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

    async def _meet(self, probe: Probe, replica: Replica, asked: str) -> None:
        kind = await self.detect(probe, asked)
        await _find_version(kind, probe, replica)
        replica.updatable = await kind.takes_weights(probe)
        replica.note(_WEIGHTS, "" if replica.updatable else f"takes no new weights: {kind.no_weights}")
        replica.logprob_mode = await kind.find_logprob_mode(probe) if replica.updatable else None
        replica.plugin = await kind.find_plugin(probe, replica)
        replica.api, replica.loads_adapters = kind.name, None
        models = () if kind.names_checkpoint else replica.models
        replica.identity = (kind.name, replica.version, replica.plugin, replica.updatable, models)

    async def _is_another(self, probe: Probe, replica: Replica, models: tuple[str, ...]) -> bool:
        """Whether another engine may answer at the address than at the last visit, or the same one, started again otherwise."""
        kind = self.of(replica)
        if replica.router:
            # Its engines answer in turn.
            return replica.identity is None
        if replica.identity is None or (replica.models != models and not kind.names_checkpoint):
            return True
        version = (await kind.read_version(probe))[0] if replica.version else ""
        return probe.reconnected or (version != "" and version != replica.version)

    async def _read_sample(self, replica: Replica, logprob_mode: str) -> None:
        """Sample a token, once, and see that it can be read. A paused engine is asked at the next visit."""
        sample, now = replica.sample, asyncio.get_running_loop().time()
        if sample.was_read:
            return
        if now < sample.again_at:
            if sample.failed:
                raise Unreadable(sample.failed)
            return
        # What breaks here says nothing about calls.
        kind = type(self.of(replica))(self._http.aside(), self._local)
        sample.missing = "it is paused, and serves once a token was sampled" if await _is_paused(kind, replica) else ""
        if sample.missing:
            return
        try:
            async with asyncio.timeout(SAMPLE_SECONDS):
                await read_sample(kind, replica, replica.logprob_mode or logprob_mode)
        except TimeoutError:
            slow = f"sampled no token within {SAMPLE_SECONDS:g} seconds when it was met, so it is busy or hangs"
            replica.note(_UNREAD, f"{slow}: it serves, and is asked again at the next visit")
            return
        except EngineBusy as error:
            sample.again_at = now + error.retry_after_seconds
            replica.note(_UNREAD, f"sampled no token when it was met: it serves, and is asked again later ({error.message})")
            return
        except NotReadable as error:
            sample.failed, sample.again_at = _describe(kind, replica, error), now + ASK_AGAIN_SECONDS
            raise Unreadable(sample.failed) from error
        sample.was_read, sample.failed = True, ""
        replica.note(_UNREAD, "")


@contextlib.contextmanager
def _report_failures() -> Iterator[None]:
    """Failures of the connection as this service's errors."""
    try:
        yield
    except TimeoutError as error:
        raise EngineUnavailable(f"no answer within {PROBE_TIMEOUT.total:g} seconds") from error
    except aiohttp.ClientConnectorError as error:
        raise NotListening(f"cannot connect: {error.strerror or error.os_error}") from error
    except (aiohttp.ClientError, OSError, ValueError) as error:
        raise EngineUnavailable(str(error) or type(error).__name__) from error


async def _find_version(kind: EngineKind, probe: Probe, replica: Replica) -> None:
    """Store the version; note one that cannot be read, and one that the kind was not run with."""
    replica.version, odd = await kind.read_version(probe)
    versions, version = kind.find_versions(probe.owner), parse_version(replica.version)
    if odd or (versions is not None and replica.version and version is None):
        replica.note(_VERSION, f"tells no version that can be read, but {odd or repr(replica.version)}")
        replica.version = ""
    elif versions is not None and version is not None and not versions.knows(version):
        known = f"the {kind.name} path is known to work on {versions}"
        replica.note(
            _VERSION, f"is {versions.program} {replica.version}, and {known}: its first answer is read, the rest is unproven"
        )
    else:
        replica.note(_VERSION, "")


async def _is_paused(kind: EngineKind, replica: Replica) -> bool:
    """False if it does not say."""
    if not replica.updatable:
        return False
    try:
        return bool(await kind.weights(replica, PROBE_TIMEOUT.total or 0.0, None).is_paused())
    except EngineFailed:
        return False


def _describe(kind: EngineKind, replica: Replica, error: NotReadable) -> str:
    path = f"{kind.name} path{' with the plugin' if replica.plugin else ''}, version {replica.version or 'unknown'}"
    return f"a sample of one token could not be read ({path}): {error}; {kind.way_out(replica)}"
