"""Deltas into a real vLLM: after each push it serves the published bits, and a spoilt one leaves it on the old ones.

The judge is transformers, on a whole checkpoint that was saved of the same version. The engine is these tests' own, in float32, and has a
mirror; what is published are the bfloat16 weights of a tiny model, of which each version changes about one element in a hundred.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
import pytest

from contract.deltas import DELTA, is_delta
from contract.tensor_files import map_tensors, read_header
from examples.vllm_server import VllmServer
from proxy.engine.in_vllm.mirror import CURRENT, LOCK
from proxy.engine.weights.vllm import WeightApi
from proxy.store.service import WeightStore
from tests.support.engine.vllm_server import running_vllm
from tests.support.engine.weight_fixtures import Judge, Said, Service, generate, generating, serving, until
from trainer_client.publish import check_tensors, write_weights
from trainer_client.publish_deltas import DeltaWriter

if TYPE_CHECKING:
    import torch

pytestmark = pytest.mark.engine

PROMPT = list(range(20, 60))
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def mirror(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mirror")


@pytest.fixture(scope="module")
def vllm_server(tiny_model: Path, mirror: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    with running_vllm(tiny_model, tmp_path_factory.mktemp("vllm"), env={"VERBATIM_MIRROR": str(mirror)}) as server:
        yield server


@dataclass
class Trainer:
    """Publishes by way of `DeltaWriter`, as `TrainerClient.publish` does, and saves each version whole beside it, for the judge."""

    service: Service
    model: Path
    folder: Path
    mirror: Path
    anchor_every: int = 20
    writer: DeltaWriter = field(default_factory=DeltaWriter)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        import torch
        from safetensors.torch import load_file

        loaded = load_file(self.model / "model.safetensors")
        self.weights = check_tensors(loaded, torch.bfloat16)
        self._random = torch.Generator().manual_seed(0)

    def train(self) -> None:
        import torch

        for name, tensor in self.weights.items():
            chosen = torch.rand(tensor.shape, generator=self._random) < 0.01
            self.weights[name] = torch.where(chosen, tensor * 1.5, tensor)

    async def write(self) -> tuple[int, Path, str]:
        """The next version, its folder and its kind."""
        self.train()
        version = await self.service.next_version()
        root = (await self.service.updater.status())["current"]["root"]
        options: dict[str, Any] = {"served_root": root, "anchor_every": self.anchor_every, "shard_bytes": 10**9}
        folder, kind = self.writer.write(self.weights, self.folder, version, config=self.model, **options)
        return version, folder, kind

    async def publish(self) -> str:
        """The kind of the next version, once it serves."""
        version, folder, kind = await self.write()
        answer = await self.service.updater.push(version, str(folder), kind)
        assert answer["applied"], answer
        self.writer.confirm()
        return kind

    def save(self, name: str) -> Path:
        return write_weights(self.weights, self.folder / name, 1, config=self.model)

    def mirrored(self) -> bool:
        """Whether the mirror holds these weights, to the bit."""
        truth = map_tensors(self.save("whole"))
        copy = map_tensors((self.mirror / CURRENT).resolve())
        return truth.keys() == copy.keys() and all(np.array_equal(truth[name].data, copy[name].data) for name in truth)


@pytest.fixture
async def service(vllm_url: str, weights: WeightStore) -> AsyncIterator[Service]:
    async with serving(weights, vllm_url) as running:
        yield running


@pytest.fixture
def trainer(service: Service, tiny_model: Path, tmp_path: Path, mirror: Path) -> Trainer:
    return Trainer(service, tiny_model, tmp_path / "weights", mirror)


async def test_five_versions_by_delta_serve_the_published_bits(trainer: Trainer, vllm_url: str) -> None:
    kinds = []
    for number in range(6):
        kinds.append(await trainer.publish())
        said = await generate(vllm_url, PROMPT, 8)
        current = (await trainer.service.updater.status())["current"]
        assert (said.spans, current["kind"]) == ([(str(current["version"]), 0, 8)], kinds[-1])
        assert trainer.mirrored()
        assert Judge().largest_error(trainer.save(f"truth-{number}"), said) < TOLERANCE
    assert kinds == ["full", *["delta"] * 5]
    assert (await trainer.service.updater.push(current["version"] + 1, str(trainer.save("beside")), "full"))["applied"]
    whole = await generate(vllm_url, PROMPT, 8)
    assert (whole.ids, whole.logprobs) == (said.ids, said.logprobs), "pushed whole, it samples the same to the bit"
    folders = [trainer.folder / f"version-{current['version'] - back}" for back in (0, 5)]
    delta, anchor = (sum(file.stat().st_size for file in folder.glob("*.safetensors")) for folder in folders)
    assert delta < 0.03 * anchor


def truncate(folder: Path, base: Path, mirror: Path) -> str:
    (folder / DELTA).write_bytes((folder / DELTA).read_bytes()[:-100])
    return f"{folder.name}/{DELTA} is not a whole safetensors file"


def flip_a_bit(folder: Path, base: Path, mirror: Path) -> str:
    name = next(iter(read_header(folder / DELTA).places))
    flip(folder / DELTA, name)
    return name


def lose_the_base(folder: Path, base: Path, mirror: Path) -> str:
    shutil.rmtree(base)
    return f"{base.name} is missing, which"


def repeat_the_base(folder: Path, base: Path, mirror: Path) -> str:
    """The link before in the place of this one: a chain by its roots, of the weights before."""
    shutil.copyfile(base / DELTA, folder / DELTA)
    return f"{folder.name} holds version"


def damage_a_changed_tensor_of_the_mirror(folder: Path, base: Path, mirror: Path) -> str:
    return flip((mirror / CURRENT).resolve() / "model.safetensors", "lm_head.weight")


def damage_an_unchanged_tensor_of_the_mirror(folder: Path, base: Path, mirror: Path) -> str:
    """Of the tiny model's norms, 32 to 128 ones, some do not change."""
    changed = read_header(folder / DELTA).places.keys()
    file = (mirror / CURRENT).resolve() / "model.safetensors"
    return flip(file, next(name for name in read_header(file).places if name not in changed))


def flip(file: Path, name: str) -> str:
    data = bytearray(file.read_bytes())
    data[read_header(file).places[name][2] + 9] ^= 1
    file.write_bytes(data)
    return f"{name} does not have the bytes that were published"


SPOILT: list[Callable[[Path, Path, Path], str]] = [
    truncate, flip_a_bit, lose_the_base, repeat_the_base, damage_a_changed_tensor_of_the_mirror,
    damage_an_unchanged_tensor_of_the_mirror,
]  # fmt: skip


async def test_a_spoilt_delta_is_named_the_old_weights_go_on_and_the_next_push_is_an_anchor(
    trainer: Trainer, vllm_url: str
) -> None:
    for spoil in SPOILT:
        kinds = [await trainer.publish(), await trainer.publish(), await trainer.publish()]
        assert kinds[-2:] == ["delta", "delta"], spoil.__name__
        truth, before = trainer.save(spoil.__name__), await trainer.service.next_version() - 1
        version, folder, kind = await trainer.write()
        assert kind == "delta"
        says = spoil(folder, folder.parent / f"version-{before}", trainer.mirror)
        answer = await trainer.service.updater.push(version, str(folder), kind)
        assert not answer["applied"], spoil.__name__
        assert any(each in answer["error"] for each in says.split("|")), (spoil.__name__, answer["error"])
        assert trainer.service.pool.ready() == (True, "")
        said = await generate(vllm_url, PROMPT, 8)
        assert said.spans == [(str(before), 0, 8)]
        assert Judge().largest_error(truth, said) < TOLERANCE
        assert await trainer.publish() == "full"
        assert trainer.mirrored()


async def test_a_stream_goes_on_while_a_delta_is_prepared(trainer: Trainer, vllm_url: str) -> None:
    """However long that takes: here another process holds the mirror's lock, until replies have grown by twenty events more."""
    await trainer.publish()
    version, folder, kind = await trainer.write()
    replies = sample_on(vllm_url)
    with (trainer.mirror / LOCK).open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        push = asyncio.create_task(trainer.service.updater.push(version, str(folder), kind))
        while not is_waited_for(lock):
            await anext(replies)
            assert not push.done()
        for _ in range(20):
            said = await anext(replies)
            assert {label for label, _, _ in said.spans} <= {str(version - 1)} and not push.done()
        fcntl.flock(lock, fcntl.LOCK_UN)
        assert (await push)["applied"]
    await replies.aclose()


async def sample_on(url: str) -> AsyncGenerator[Said, None]:
    """A reply after the other, as each grows."""
    while True:
        async for said in generating(url, PROMPT, 500):
            yield said


def is_waited_for(lock: IO[bytes]) -> bool:
    """Whether a process waits for the lock on that file."""
    inode = os.fstat(lock.fileno()).st_ino
    return any("->" in line and f":{inode} " in line for line in Path("/proc/locks").read_text().splitlines())


async def test_a_push_says_what_its_folder_holds(trainer: Trainer) -> None:
    await trainer.publish()
    version, folder, kind = await trainer.write()
    anchor = next(path for path in trainer.folder.iterdir() if not is_delta(path))
    for path, wrong, says in (
        (folder, "full", "holds a delta: push it as kind delta"),
        (anchor, "delta", "push it as kind full"),
    ):
        answer = await trainer.service.updater.push(version, str(path), wrong)
        assert not answer["applied"] and says in answer["error"]
    assert (await trainer.service.updater.push(version, str(folder), kind))["applied"]


async def test_after_a_rollback_to_a_delta_the_next_version_is_an_anchor(trainer: Trainer, vllm_url: str) -> None:
    """Never a delta on what the trainer remembers: the engines hold other weights."""
    for _ in range(2):
        await trainer.publish()
    truth, earlier = trainer.save("earlier"), (await trainer.service.updater.status())["current"]
    assert [await trainer.publish(), await trainer.publish()] == ["delta", "delta"]
    version = await trainer.service.next_version()
    assert (await trainer.service.updater.push(version, earlier["path"], earlier["kind"]))["applied"]
    assert (await trainer.service.updater.status())["current"]["root"] == earlier["root"]
    assert Judge().largest_error(truth, await generate(vllm_url, PROMPT, 8)) < TOLERANCE
    assert [await trainer.publish(), await trainer.publish()] == ["full", "delta"]
    assert trainer.mirrored()


@pytest.mark.parametrize("lost", ["nothing", "the mirror", "the store"])
async def test_an_engine_that_started_again_folds_the_chain_before_it_serves(
    lost: str, trainer: Trainer, vllm_url: str, weights: WeightStore
) -> None:
    """In one load. An engine that outlived the store tells it what it holds."""
    assert [await trainer.publish() for _ in range(3)] == ["full", "delta", "delta"]
    state = await weights.current()
    api = WeightApi(trainer.service.pool.http.session, trainer.service.pool.replicas[0], 60)
    if lost == "the store":
        await weights._redis.execute("FLUSHALL")
    else:
        await api.pause("keep")
        await api.load_full(str(trainer.model), state.version - 1)
        await api.set_label("default")
        await api.resume()
    if lost == "the mirror":
        with suppress(FileNotFoundError):
            shutil.rmtree((trainer.mirror / CURRENT).resolve())
    before = (await api.read_loaded()).updates
    async with serving(weights, vllm_url) as other:
        await until(lambda: other.pool.ready()[0], lambda: other.pool.ready()[1])
        said = await generate(vllm_url, PROMPT, 8)
        assert (await api.read_loaded()).updates == before + (lost != "the store")
        current = (await other.updater.status())["current"]
    assert (current["root"], current["kind"], current["path"]) == (state.root, "delta", state.path)
    assert said.spans == [(str(state.version), 0, 8)]
    assert Judge().largest_error(trainer.save("truth"), said) < TOLERANCE
    assert trainer.mirrored()
