"""LoRA adapters in an engine: how their versions are named there, how one is loaded, and which of them a replica serves.

A version is loaded beside the earlier ones under a name of its own, `learner@v5.17.1f3a9c2e`: version, fence of the push, and the store
it was pushed through. vLLM lists these names with the folders they were loaded from, so the engine itself says what it holds, whatever
became of the process that pushed. Nothing pauses, and no call changes its weights: one that names a version ends under that version,
those of other adapters and of the base model do not notice. A push that another one has overtaken loads under a name that nobody uses.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Mapping
from dataclasses import dataclass

from proxy.engine.replica import Replica, Served
from proxy.engine.weights.vllm import WeightApi
from proxy.errors import EngineFailed
from proxy.store.service import WeightState

SETUP_ADAPTERS = (
    "start vLLM with --enable-lora, --lora-modules NAME=PATH and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, which it refuses with several API "
    "servers (--api-server-count, or data parallel without its limit of one)"
)

REPLACED = "replaced"
"""The topic of the note about an adapter that was replaced beside this service."""

_LOADED = re.compile(r"(.+)@v(\d+)\.(\d+)\.([0-9a-f]{8})", re.DOTALL)


@dataclass(frozen=True, slots=True)
class LoadedVersion:
    """A pushed version of an adapter by the engine's name of it; `root` is the folder it was loaded from."""

    adapter: str
    version: int
    fence: int
    store: str
    root: str = ""

    @property
    def name(self) -> str:
        return f"{self.adapter}@v{self.version}.{self.fence}.{self.store}"


def name_version(adapter: str, version: int, fence: int, identity: str) -> LoadedVersion:
    """A version that is to be loaded; `identity`: the store's."""
    return LoadedVersion(adapter, version, fence, identity[:8])


def parse_loaded(name: str, root: str = "") -> LoadedVersion | None:
    """None for a name that no push gave."""
    found = _LOADED.fullmatch(name)
    return None if found is None else LoadedVersion(found[1], int(found[2]), int(found[3]), found[4], root)


def list_adapters(cards: Mapping[str, str]) -> list[str]:
    """The adapters of an engine by their own names."""
    loaded = {name: parse_loaded(name) for name in cards}
    return list(dict.fromkeys(name if version is None else version.adapter for name, version in loaded.items()))


def find_loaded(cards: Mapping[str, str], adapter: str) -> list[LoadedVersion]:
    """The pushed versions of the adapter that the engine has."""
    versions = (parse_loaded(name, root) for name, root in cards.items())
    return [version for version in versions if version is not None and version.adapter == adapter]


def find_served(replica: Replica, current: WeightState) -> Served | None:
    """What calls for the adapter get while `current` is the policy's version; None if its engine does not hold that."""
    adapter, cards = str(replica.adapter), replica.host.cards
    if current.version > 0:
        held = [each for each in find_loaded(cards, adapter) if (each.version, each.root) == (current.version, current.path)]
        return Served(held[-1].name, True, current.version, held[-1].root) if held else None
    if adapter not in cards:
        return None
    began = replica.served.root if replica.served.name == adapter else None
    if began is not None and began != cards[adapter]:
        replica.note(
            REPLACED,
            f"had its adapter {adapter!r} replaced from {cards[adapter]}: push that folder, and its tokens are trained",
        )
        return Served(adapter, True, None, began)
    return Served(adapter, True, 0, cards[adapter])


def find_foreign(replica: Replica, current: WeightState, identity: str) -> LoadedVersion | None:
    """The newest version that the engine has from another store, a service's beside this one or that was lost, if it is newer than
    `current`: versions only grow."""
    loaded = find_loaded(replica.host.cards, str(replica.adapter))
    foreign = [each for each in loaded if each.store != identity[:8] and each.version > current.version]
    return max(foreign, key=lambda each: each.version, default=None)


async def load_version(api: WeightApi, replica: Replica, state: WeightState, fence: int, identity: str) -> None:
    """Returns when the engine holds the adapter's version beside those it had. Raises EngineFailed; then nothing has changed."""
    name = name_version(str(replica.adapter), state.version, fence, identity).name
    await api.load_adapter(name, str(state.path))
    replica.host.cards = {**replica.host.cards, name: str(state.path)}


def switch(replica: Replica, served: Served, *, cut: bool) -> None:
    """New calls get that version. Those in flight end under theirs, now if they are to be `cut`."""
    before, same = replica.served, replica.served == served
    replica.weight_version = served.version
    if served.version is not None:
        replica.note(REPLACED, "")
    if same:
        return
    replica.served = served
    if cut:
        for abort in list(before.aborts):
            task = asyncio.ensure_future(abort(again=False))
            _cutting.add(task)
            task.add_done_callback(_cutting.discard)


async def unload_old(api: WeightApi, replica: Replica, before: Served, identity: str) -> None:
    """Take from the engine what this store loaded there, except the version that serves and the one before, which processes that have not
    looked since still name."""
    for each in find_loaded(replica.host.cards, str(replica.adapter)):
        if each.store == identity[:8] and each.name not in (before.name, replica.served.name):
            with contextlib.suppress(EngineFailed):
                await api.unload_adapter(each.name)


_cutting: set[asyncio.Future[bool]] = set()
