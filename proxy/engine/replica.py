"""Replica: one policy of one engine as the pool knows it, and the engine's recent health."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import TracebackType
from typing import Any

from proxy.errors import EngineUnavailable
from proxy.timeline import AbortRequest, CancelScope
from reconstruct.spans import Span

log = logging.getLogger(__name__)

_VERSION = re.compile(r"v?(\d+)\.(\d+)(?:\.(\d+))?(?![\d])[\w.+-]*")

STARTED_UNDER = "default"
"""The label vLLM and SGLang give the weights they were started with."""


@dataclass(frozen=True, slots=True)
class HealthRule:
    """`failures` in a row, of calls or of probes, eject a replica. After two ejections within `flap_seconds` it needs
    `return_probes` good probes in a row to return, otherwise one."""

    failures: int = 3
    return_probes: int = 3
    flap_seconds: float = 60.0


class Health:
    """Counts one replica's recent failures and good probes; `Standing` ejects and readmits.

    A broken call or a timed-out probe may be chance, so only several in a row count."""

    def __init__(self, rule: HealthRule = HealthRule(), clock: Callable[[], float] = time.monotonic) -> None:
        self._rule = rule
        self._clock = clock
        self._failed_calls = 0
        self._failed_probes = 0
        self._good_probes = 0
        self._needed = 1
        self._ejections: deque[float] = deque(maxlen=2)

    @property
    def has_recovered(self) -> bool:
        """Whether it has answered as many probes in a row as it needs to serve."""
        return self._good_probes >= self._needed

    @property
    def missing_probes(self) -> int:
        return max(0, self._needed - self._good_probes)

    @property
    def is_doubtful(self) -> bool:
        """Whether its last call or probe failed, so that it should be visited again soon."""
        return self._failed_calls > 0 or self._failed_probes > 0

    def fail_call(self) -> bool:
        """Whether that is one too many in a row."""
        self._failed_calls += 1
        return self._failed_calls >= self._rule.failures

    def pass_call(self) -> None:
        self._failed_calls = 0

    def fail_probe(self) -> bool:
        """Whether that is one too many in a row."""
        self._good_probes = 0
        self._failed_probes += 1
        return self._failed_probes >= self._rule.failures

    def pass_probe(self) -> None:
        self._failed_probes = 0
        self._good_probes += 1

    def eject(self) -> None:
        """Set what it needs to return."""
        now = self._clock()
        self._ejections.append(now)
        flaps = sum(1 for at in self._ejections if now - at <= self._rule.flap_seconds)
        self._needed = self._rule.return_probes if flaps > 1 else 1
        self._good_probes = self._failed_calls = self._failed_probes = 0


@dataclass(slots=True)
class FirstSample:
    """What became of the token that an engine samples when it is met (`EngineKinds.contact`). `missing`: why it was not taken and the
    replica does not serve; `failed`: why it could not be read, and it is taken again at `again_at` of the event loop's clock."""

    was_read: bool = False
    missing: str = ""
    failed: str = ""
    again_at: float = 0.0


@dataclass(frozen=True, slots=True)
class Served:
    """What one call is sampled from, taken before the engine is asked: a push may end before the call does.

    `name` is the engine's own. Of an adapter that name stands for one version, `version` (None: unknown), for as long as the engine has
    it; the version of a base model is told by the engine's label. `aborts` end the calls that are sampled from it by this process."""

    name: str = ""
    adapter: bool = False
    version: int | None = None
    root: str | None = None
    aborts: set[AbortRequest] = field(default_factory=set, compare=False)

    def read_spans(self, base: Sequence[Span]) -> tuple[Span, ...]:
        """The versions of a choice's tokens, of which `base` are those of the engine's base model; empty where any is unknown. New weights
        of the base model change no adapter's version."""
        if not self.adapter or not base:
            return tuple(base)
        return () if self.version is None else (Span(self.version, base[0].start, base[-1].end),)


@dataclass(frozen=True, slots=True)
class TokenCounts:
    """What an engine counts of all its calls: `progress` changes with every step it takes, `running` and `queued` are requests. Without
    `progress` it counts nothing."""

    progress: tuple[float, ...] = ()
    running: float = 0.0
    queued: float = 0.0


@dataclass(slots=True, eq=False)
class Pulse:
    """The calls that a replica samples for this process, and its last signs of life, by `time.perf_counter`.

    `answered` is when the newest call that got its reply was begun, and when it last heard. `counts` is what the engine told last, at
    `counted_at`; None while it was never asked."""

    calls: set[EngineCall] = field(default_factory=set)
    heard_at: float = 0.0
    answered: tuple[float, float] = (0.0, 0.0)
    counts: TokenCounts | None = None
    counted_at: float = 0.0
    stalled_at: float = 0.0

    @property
    def last_sign_at(self) -> float:
        """When a call last heard of a token or of the end of its reply, or the engine was found alive otherwise."""
        return max(self.heard_at, max((call.scope.heard_at for call in self.calls), default=0.0))


@dataclass(slots=True, eq=False)
class EngineCall:
    """`with EngineCall(replica, scope, streams=...) as call:` around the engine's work. Leaving it raises EngineUnavailable if the call was
    moved. `streams`: its tokens come as they are sampled."""

    replica: Replica
    scope: CancelScope
    streams: bool
    begun_at: float = 0.0
    moved: bool = False
    doubtful: bool = False
    """Whether it seemed lost when it was last looked at."""
    _cancelling: int = 0
    _task: asyncio.Task[Any] | None = None

    @property
    def heard_at(self) -> float:
        """Since when it waits for the next sign of life."""
        return self.scope.heard_at or self.begun_at

    def move(self) -> None:
        """Leave the engine, of which the call has heard nothing."""
        if self._task is not None and not self.moved:
            self.moved = True
            self._task.cancel()

    def __enter__(self) -> EngineCall:
        self._task = asyncio.current_task()
        self._cancelling = 0 if self._task is None else self._task.cancelling()
        self.begun_at = time.perf_counter()
        self.replica.pulse.calls.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        pulse, heard_at = self.replica.pulse, self.scope.heard_at
        pulse.calls.discard(self)
        pulse.heard_at = max(pulse.heard_at, heard_at)
        if heard_at and kind is None:
            pulse.answered = max(pulse.answered, (self.begun_at, heard_at))
        alone = self.moved and self._task is not None and self._task.uncancel() <= self._cancelling
        if alone and kind is asyncio.CancelledError:
            raise EngineUnavailable(f"engine {self.replica.name} showed no sign of life") from error


@dataclass(slots=True, eq=False)
class Replica:
    """One policy of one engine: its base model, or one of its LoRA adapters.

    An adapter's replica has a `base`, that of the base model, which the pool visits; what belongs to the engine is the same on both. The
    base model's has `adapters`, those of the engine, `cards`, the folder of every adapter by the engine's name of it, and `loads_adapters`:
    it loads others while it runs (None: not asked yet).

    `api` is the name of its kind (see `EngineKind`), None until it was reached. `models` are the models it serves, empty if it does not
    say; `names` all that it answers to; `adapter` the adapter's name, `served` which of its versions calls get. `policy` is the model
    whose pool and version line it belongs to, "" the default one. `source` says where it comes from: settings, api or a watched name.

    `version` is the engine's own, "" if it does not say. `plugin`: it has this project's endpoint plugin. `updatable`: it has endpoints
    that take new weights. `trainable`: it returns token ids and logprobs. `weight_version` is None while unknown; 0 is whatever the
    engine was started with. `logprob_mode` is None if it does not say. `draining`: it left the pool and only ends its calls.
    `stalled`: it has calls and shows no sign of life. `in_flight` counts this process's calls there, at most `max_calls` (0:
    unlimited).
    """

    name: str
    url: str
    policy: str = ""
    api: str | None = None
    api_path: str = "/v1"
    """Where its OpenAI routes stand under its URL: /v1 or, as at Gemini's `/v1beta/openai`, nothing more."""
    healthy: bool = False
    reason: str = "it was not reached yet"
    alive: bool = False
    models: tuple[str, ...] = ()
    adapter: str | None = None
    served: Served = Served()
    base: Replica | None = None
    adapters: list[Replica] = field(default_factory=list)
    cards: dict[str, str] = field(default_factory=dict)
    loads_adapters: bool | None = None
    listed: bool = True
    """Whether the engine still lists the adapter."""
    max_model_len: int | None = None
    version: str = ""
    plugin: bool = False
    updatable: bool = False
    trainable: bool = True
    weight_version: int | None = None
    names: tuple[str, ...] = ()
    source: str = "settings"
    logprob_mode: str | None = None
    draining: bool = False
    stalled: bool = False
    in_flight: int = 0
    max_calls: int = 0
    health: Health = field(default_factory=Health)
    pulse: Pulse = field(default_factory=Pulse)
    store_problem: str = ""
    """Why the store could not say which weights it should hold, while that keeps it from serving."""
    unordered_label: str | None = None
    """The last weight label that was not a version."""
    refused_fields: set[tuple[str, str, bool | None]] = field(default_factory=set)
    """Fields of a request that it does not take, with the model and whether streamed where only that is so ("", None: always)."""
    returns_ids: dict[bool, bool] = field(default_factory=dict)
    """Whether its last reply had token ids and logprobs, by whether it was streamed."""
    vocabulary: str = ""
    """A digest of all ids with their tokens; "" if it does not say."""
    tells_cached: bool = False
    """Its answers to what is to be scored say how many ids it had cached."""
    router: bool = False
    """Several engines answer at its URL: it takes no weights, and its plugin is not used."""
    sightings: dict[str, list[str]] = field(default_factory=dict)
    """What told the engine apart from others at its URL, by source, oldest first (`proxy.engine.apis.routers`)."""
    identity: tuple[object, ...] | None = None
    """What it was when it was met; one that is something else by now is met again."""
    sample: FirstSample = field(default_factory=FirstSample)
    notes: dict[str, str] = field(default_factory=dict)
    """What an operator should know about it though it may serve: by topic, a sentence of which it is the subject."""

    def note(self, topic: str, sentence: str) -> None:
        """Tell that about this replica, in the log once and in `GET /engines` while it holds; "" once it no longer does."""
        if not sentence:
            self.notes.pop(topic, None)
        elif self.notes.get(topic) != sentence:
            self.notes[topic] = sentence
            log.warning("engine %s %s", self.name, sentence)

    def forget_replies(self) -> None:
        """It was away: another engine, or another version of it, may answer now."""
        self.refused_fields.clear()
        self.returns_ids.clear()
        self.trainable, self.tells_cached = True, False
        for topic in ("fields", "ids", "thinking"):
            self.note(topic, "")

    def note_ids(self, there: bool | None, *, streamed: bool) -> None:
        """Tell whether a reply had token ids and logprobs; None: it does not show. Without them calls are served and never trained."""
        if there is None or self.returns_ids.get(streamed) == there:
            return
        self.returns_ids[streamed] = there
        self.trainable = any(self.returns_ids.values())
        lacking = [streamed for streamed, there in self.returns_ids.items() if not there]
        if not lacking:
            self.note("ids", "")
        elif self.trainable:
            where = "in streams" if lacking[0] else "in whole replies"
            self.note("ids", f"returns no token ids, or no logprobs, {where}: those calls are served and never trained")
        else:
            self.note("ids", "returns no token ids, or no logprobs: its calls are served and never trained")

    def precedes(self, version: tuple[int, ...]) -> bool:
        """Whether its own version is older; False if it does not say which it is."""
        own = parse_version(self.version)
        return own is not None and own < version

    @property
    def description(self) -> str:
        """Its version, path, and what can be done with it."""
        plugin = " with the plugin" if self.plugin else ""
        trains, takes = "trainable" if self.trainable else "not trainable", "takes" if self.updatable else "takes no"
        return f"version {self.version or 'unknown'}, path {self.api}{plugin}, {trains}, {takes} weights"

    @property
    def met(self) -> bool:
        """Whether it was ever reached, and has listed its models if it lists any."""
        return self.api is not None or bool(self.names)

    @property
    def title(self) -> str:
        """Its name in the log."""
        return f"{self.name} (adapter {self.adapter})" if self.adapter else self.name

    @property
    def host(self) -> Replica:
        """The replica of its engine's base model."""
        return self.base or self

    @property
    def engine(self) -> Sequence[Replica]:
        """All replicas of its engine, the base model's first."""
        return (self.host, *self.host.adapters)

    @property
    def has_room(self) -> bool:
        """Whether the engine can take another call."""
        return not self.max_calls or sum(replica.in_flight for replica in self.engine) < self.max_calls

    def find_logprob_mode(self, modes: Mapping[str, str]) -> str:
        """vLLM's `--logprobs-mode`: as it says itself, else as its operator says of its policy's engines (`modes`); "" if neither does."""
        return self.logprob_mode or modes.get(self.policy) or modes.get(self.host.policy) or ""

    def serve(self, asked: str) -> Served:
        """What a call for `asked` is sampled from now."""
        return self.served if self.adapter else Served(self.name_served(asked))

    def name_served(self, asked: str) -> str:
        """The engine's own name for `asked`: an adapter's is its version's. An unknown name means the first base model. An engine that
        lists no models gets the name as it is and may refuse it."""
        if self.adapter:
            return self.served.name
        if not asked or asked in self.names or not self.models:
            return asked
        return self.models[0]

    def version_of(self, label: str | None) -> int | None:
        """The weight version behind an engine's label, or None: then the tokens must not reach a trainer.

        An engine that cannot take weights keeps those it started with, so no label, or the initial one, means the replica's version.
        Any other label must be a number: whatever else someone labels the weights has no place in the order of versions.
        """
        if label is not None and label.isdecimal():
            return int(label)
        if self.updatable or label not in (None, STARTED_UNDER):
            self._warn_of(label)
            return None
        return self.weight_version

    def _warn_of(self, label: str | None) -> None:
        """Log each new label once."""
        if label not in (self.unordered_label, STARTED_UNDER, None):
            log.warning(
                "engine %s labels its weights %r, which is not a version number: what it samples will not be trained",
                self.name,
                label,
            )
        self.unordered_label = label


@lru_cache(maxsize=256)
def parse_version(text: str) -> tuple[int, ...] | None:
    """(major, minor, patch) of a text like 0.32.0+cpu or 0.33.1rc1; None for anything else."""
    found = _VERSION.fullmatch(text)
    return None if found is None else tuple(int(number or 0) for number in found.groups())
