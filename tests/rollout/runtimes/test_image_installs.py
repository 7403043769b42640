"""What an image lacks is installed once into a layer over it; the engine here keeps layers as names, its runtimes are plain ones."""

from __future__ import annotations

import asyncio
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from contract.tasks import RuntimeSpec
from rollout.runtimes.base import Install, Installed, Logs, ProxyAddress, Runtime, RuntimeFailed
from rollout.runtimes.installs import REPOSITORY, ImageInstalls, Uses
from tests.support.runtimes.plain_runtime import PlainRuntime

PROXY, SPEC = ProxyAddress("127.0.0.1", 9), RuntimeSpec("docker", image="judge")


class Engine:
    def __init__(self) -> None:
        self.images = {"judge": "sha256:1"}
        self.pulled: list[str] = []
        self.commits: list[tuple[str, str]] = []
        self.in_use: set[str] = set()

    async def has_image(self, image: str) -> bool:
        return image in self.images

    async def pull(self, image: str) -> None:
        if image != "far":
            raise RuntimeFailed(f"there is no image {image}")
        self.pulled.append(image)
        self.images[image] = "sha256:far"

    async def call(self, *words: str, seconds: float = 60.0) -> str:
        match words:
            case ("image", "inspect", "--format", "{{.Id}}", image):
                return self.images[image]
            case ("commit", container, layer):
                self.commits.append((container, layer))
                self.images[layer] = "sha256:layer"
                return "sha256:layer"
            case ("rmi", layer):
                if layer in self.in_use:
                    raise RuntimeFailed("image is being used by a container")
                del self.images[layer]
                return ""
        raise RuntimeFailed(f"unknown: {words}")


class Place:
    """Makes runtimes, and remembers for what."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.made: list[tuple[RuntimeSpec, str]] = []
        self.installs = ImageInstalls(self.make, Uses(folder / "layers", 2, "VERBATIM_CONTAINER_DIR"))
        self.engine = Engine()

    def make(self, spec: RuntimeSpec, name: str, proxy: ProxyAddress) -> Runtime:
        self.made.append((spec, name))
        return PlainRuntime(self.folder / name)

    async def install(self, install: Install, name: str, spec: RuntimeSpec = SPEC) -> Installed:
        logs = Logs(self.folder / "install.out", self.folder / "install.err")
        return await self.installs.install(self.engine, spec, install, name, PROXY, logs)  # type: ignore[arg-type]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@pytest.fixture
def install(tmp_path: Path) -> Install:
    command = str(tmp_path / "bin" / "agent-x")
    return Install(command, ("echo ran", f"mkdir {tmp_path}/bin && ln -s /bin/true {command}"))


async def test_a_layer_is_made_once_per_image_and_lines(place: Place, install: Install) -> None:
    specs = [made.spec for made in await asyncio.gather(*(place.install(install, f"c-{number}") for number in range(3)))]
    ((container, layer),) = place.engine.commits
    assert layer.startswith(f"{REPOSITORY}:") and specs == [replace(SPEC, image=layer)] * 3
    ((made, name),) = place.made
    assert (made.network, made.image, name) == ("full", "judge", container)
    assert (place.folder / "install.out").read_text() == "ran\n"


async def test_an_image_of_another_content_gets_another_layer(place: Place, install: Install) -> None:
    await place.install(install, "c-1")
    (place.folder / "bin" / "agent-x").unlink()
    (place.folder / "bin").rmdir()
    place.engine.images["judge"] = "sha256:2"
    await place.install(install, "c-2")
    assert len({layer for _, layer in place.engine.commits}) == 2


async def test_an_image_that_is_far_is_fetched_first(place: Place, install: Install) -> None:
    await place.install(install, "c-1", replace(SPEC, image="far"))
    assert place.engine.pulled == ["far"] and len(place.engine.commits) == 1
    with pytest.raises(RuntimeFailed, match="there is no image nowhere"):
        await place.install(install, "c-2", replace(SPEC, image="nowhere"))


@pytest.mark.parametrize(
    ("install", "failure"),
    [
        (Install("sh", ("exit 1",)), ""),
        (Install("agent-x", ("exit 3",)), "exit code 3"),
        (Install("agent-x", ("true",)), "'agent-x' does not exist after its installation"),
    ],
    ids=str,
)
async def test_what_is_there_anyway_or_fails_leaves_the_spec_as_it_is_and_why_is_told(
    place: Place, install: Install, failure: str
) -> None:
    for name in ("c-1", "c-2"):
        made = await place.install(install, name)
        assert made.spec == SPEC and failure in made.failure and bool(failure) is bool(made.failure)
    assert place.engine.commits == [] and len(place.made) == 1


async def test_the_layers_that_were_unused_for_longest_are_removed_but_none_in_use(place: Place) -> None:
    """Two are kept. The fourth is made when all others are old, one is in use, and the first was used again a moment ago."""
    layers: list[Any] = []
    for number in range(4):
        command = place.folder / f"agent-{number}"
        if number == 3:
            for age, layer in enumerate(layers):
                os.utime(place.folder / "layers" / layer.rpartition(":")[2], (1000.0 + age, 1000.0 + age))
            place.engine.in_use.add(layers[1])
            await place.install(Install(str(place.folder / "agent-0"), (f"ln -s /bin/true {place.folder}/agent-0",)), "c")
        made = await place.install(Install(str(command), (f"ln -s /bin/true {command}",)), f"c-{number}")
        layers.append(made.spec.image or "")
    there = [layer in place.engine.images for layer in layers]
    assert there == [True, True, False, True]
