"""Harnesses that an image lacks, installed once per image into a layer over it, which every later container is made of."""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from rollout.runtimes.base import Install, Installed, Logs, Route, Runtime, RuntimeFailed
from rollout.runtimes.installs import LEAST_MEMORY_MB, carry_out, is_there
from rollout.runtimes.uses import Uses
from rollout.task import RuntimeSpec

log = logging.getLogger(__name__)

REPOSITORY = "localhost/verbatim-harness"
COMMIT_SECONDS = 600.0


class ImageEngine(Protocol):
    """Docker or podman by its command line."""

    async def has_image(self, image: str) -> bool: ...

    async def pull(self, image: str) -> None:
        """Raises `RuntimeFailed`."""

    async def told(self, *words: str, seconds: float = ...) -> str:
        """What the subcommand says on stdout, stripped, within so long. Raises `RuntimeFailed`."""


class ImageInstalls:
    """One per kind. `make` is the kind's own; the name of a runtime is that of its container. Those of the layers that were made from
    here are removed that `uses` says are too many; one of which there is a container the engine itself keeps."""

    def __init__(self, make: Callable[[RuntimeSpec, str, Route], Runtime], uses: Uses) -> None:
        self._make = make
        self._uses = uses
        self._settled: dict[str, str] = {}
        """Layers that are not to be made, and why the command could not be installed; empty: it is there anyway."""
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)

    async def installed(
        self, engine: ImageEngine, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs
    ) -> Installed:
        """See `RuntimeKind.installed`; the spec's image is then the layer."""
        assert spec.image is not None, "the kind's check asks for one"
        async with self._locks[f"{spec.image} {install.key}"]:
            layer = await _layer(engine, spec.image, install)
            if layer not in self._settled and not await engine.has_image(layer):
                await self._settle(engine, spec, install, name, route, logs, layer)
            if layer in self._settled:
                return Installed(spec, self._settled[layer])
            self._uses.note(_tag(layer))
            return Installed(replace(spec, image=layer))

    async def _settle(
        self, engine: ImageEngine, spec: RuntimeSpec, install: Install, name: str, route: Route, logs: Logs, layer: str
    ) -> None:
        memory_mb = max(spec.memory_mb, LEAST_MEMORY_MB)
        # Whatever user the layer is for: programs are installed by root.
        options = {**spec.options, "user": 0}
        runtime = self._make(replace(spec, network="full", memory_mb=memory_mb, disk_mb=None, options=options), name, route)
        try:
            await runtime.start()
            if await is_there(runtime, install):
                self._settled[layer] = ""
                return
            await carry_out(runtime, install, logs)
            await engine.told("commit", name, layer, seconds=COMMIT_SECONDS)
            self._uses.note(_tag(layer))
            await self._remove_old(engine)
        except RuntimeFailed as error:
            # Each rollout tries it for itself then, and says what went wrong.
            log.warning("%s cannot be installed over the image %s: %s", install.command, spec.image, error)
            self._settled[layer] = str(error)
        finally:
            await runtime.stop()

    async def _remove_old(self, engine: ImageEngine) -> None:
        for tag in self._uses.too_many():
            layer = f"{REPOSITORY}:{tag}"
            try:
                await engine.told("rmi", layer)
            except RuntimeFailed as error:
                log.info("the layer %s is kept: %s", layer, error)
            if not await engine.has_image(layer):
                self._uses.forget(tag)


def _tag(layer: str) -> str:
    return layer.rpartition(":")[2]


async def _layer(engine: ImageEngine, image: str, install: Install) -> str:
    """Its name. An image that is given another content under its name gets another layer."""
    if not await engine.has_image(image):
        await engine.pull(image)
    identity = await engine.told("image", "inspect", "--format", "{{.Id}}", image)
    return f"{REPOSITORY}:{hashlib.sha256(f'{identity} {install.key}'.encode()).hexdigest()[:32]}"
