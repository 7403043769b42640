"""New weights into a real vLLM: what is sampled after a push is sampled under the new weights, and says so.

The judge is transformers: every stored logprob is recomputed in float32 from the checkpoint that its span names. The engine is these
tests' own and keeps its weights from test to test, so versions start where the last test left them.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from examples.vllm_server import VllmServer
from proxy.engine.weights.vllm import Claim, Claimed, StepRefused, Transfer, WeightApi
from proxy.errors import Conflict, EngineFailed, RequestError
from proxy.store.service import WeightState, WeightStore
from tests.end_to_end.test_delta_updates import Trainer
from tests.support.engine.vllm_server import running_vllm
from tests.support.engine.weight_fixtures import Judge, Said, Service, generate, generating, serving

pytestmark = pytest.mark.engine

PROMPT = list(range(20, 60))
LONG_PROMPT = [20 + 7 * i % 900 for i in range(700)]
"""More than five of vLLM's blocks of 128 tokens, so that a stale prefix cache would be hit."""
OUTLASTING = 30_000
"""Tokens of a reply that no push outlasts, on a machine however busy: it is cut as soon as it has shown what it is to show."""
ROOM = ("--max-model-len", "32768")
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def vllm_server(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmServer]:
    """In the place of the one that all tests share, which must go on with the weights it was started with."""
    with running_vllm(tiny_model, tmp_path_factory.mktemp("vllm"), *ROOM) as server:
        yield server


@pytest.fixture(scope="session")
def judge() -> Judge:
    return Judge()


@pytest.fixture(scope="session")
def checkpoint(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The checkpoint of a seed; 0 is what the engine started with. Made before any test: a push must not wait for it."""
    from examples.demo.tiny_model import make_tiny_model

    folder = tmp_path_factory.mktemp("checkpoints")
    made = [tiny_model, *(make_tiny_model(folder / f"seed{seed}", seed=seed) for seed in (1, 2))]
    return made.__getitem__


@pytest.fixture
async def service(vllm_url: str, weights: WeightStore) -> AsyncIterator[Service]:
    async with serving(weights, vllm_url) as running:
        yield running


async def pushed(service: Service, path: Path, **how: Any) -> int:
    version = await service.next_version()
    answer = await service.updater.push(version, str(path), **how)
    assert answer["applied"], json.dumps(answer)
    return version


async def test_tokens_after_a_push_are_sampled_under_the_new_weights(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    for seed in (1, 2):
        version = await pushed(service, checkpoint(seed))
        said = await generate(vllm_url, PROMPT, 24)
        assert said.spans == [(str(version), 0, 24)]
        assert judge.largest_error(checkpoint(seed), said) < TOLERANCE
        assert judge.largest_error(checkpoint(3 - seed), said) > 0.1


async def test_a_push_says_how_long_the_replica_took_and_how_long_it_sampled_nothing(
    service: Service, checkpoint: Callable[[int], Path]
) -> None:
    answer = await service.updater.push(await service.next_version(), str(checkpoint(1)))
    (replica,) = answer["replicas"].values()
    assert 0 < replica["paused_seconds"] < replica["seconds"] <= answer["seconds"]


@pytest.mark.parametrize("mode", ["keep", "wait", "abort"])
async def test_a_stale_prefix_is_never_used(
    mode: str, service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """The long prompt's blocks are in the cache, computed under the old weights, when the push comes."""
    await pushed(service, checkpoint(1))
    before = await generate(vllm_url, LONG_PROMPT, 8)
    again = await generate(vllm_url, LONG_PROMPT, 8)
    assert again.ids == before.ids
    await pushed(service, checkpoint(2), mode=mode)
    after = await generate(vllm_url, LONG_PROMPT, 8)
    assert judge.largest_error(checkpoint(1), again) < TOLERANCE
    assert judge.largest_error(checkpoint(2), after) < TOLERANCE


async def ask(url: str, route: str, body: Any = None) -> tuple[int, Any]:
    """One of vLLM's own routes: status and answer. On a connection of its own, for vLLM drops it after an internal error."""
    async with aiohttp.ClientSession() as http, http.post(url + route, json=body) as response:
        return response.status, await response.json()


async def until_paused(url: str, push: asyncio.Task[int]) -> None:
    async with aiohttp.ClientSession() as http:
        paused = False
        while not (paused or push.done()):
            async with http.get(f"{url}/is_paused") as response:
                paused = (await response.json())["is_paused"]


class Reply:
    """A reply under way."""

    def __init__(self, url: str, prompt_ids: list[int], max_tokens: int, **how: Any) -> None:
        self.said = Said(prompt_ids, [], [], [], None)
        self._grown = asyncio.Condition()
        self.task = asyncio.create_task(self._read(generating(url, prompt_ids, max_tokens, **how)))

    async def longer_by(self, tokens: int) -> None:
        """Fails when the reply ends before that."""
        wanted = len(self.said.ids) + tokens
        growth = asyncio.create_task(self._longer_than(wanted))
        try:
            await asyncio.wait({growth, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not growth.done():
                said = await self.task
                assert len(said.ids) >= wanted, f"it ended with {len(said.ids)} tokens: {said.finish_reason}, {said.spans}"
        finally:
            growth.cancel()

    async def _longer_than(self, tokens: int) -> None:
        async with self._grown:
            await self._grown.wait_for(lambda: len(self.said.ids) >= tokens)

    async def _read(self, growing: AsyncIterator[Said]) -> Said:
        async for said in growing:
            async with self._grown:
                self.said = said
                self._grown.notify_all()
        return self.said


async def begun(url: str, prompt_ids: list[int], max_tokens: int, **how: Any) -> Reply:
    """A reply that has said at least five tokens."""
    reply = Reply(url, prompt_ids, max_tokens, **how)
    await reply.longer_by(5)
    return reply


async def test_keep_goes_on_under_the_new_weights_and_each_span_matches_its_own(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """The reply freezes, its context is computed again under the new weights, and the next token comes from them."""
    first = await pushed(service, checkpoint(1))
    reply = await begun(vllm_url, LONG_PROMPT, OUTLASTING)
    second = await pushed(service, checkpoint(2), mode="keep")
    await reply.longer_by(20)
    assert (await ask(vllm_url, "/abort_requests", {}))[0] == 200
    said = await reply.task
    length = len(said.ids)
    (old, start, cut), (new, after, end) = said.spans
    assert (old, start, new, end) == (str(first), 0, str(second), length)
    assert 0 < cut == after < length
    assert judge.largest_error(checkpoint(1), said, 0, cut) < TOLERANCE
    assert judge.largest_error(checkpoint(2), said, cut, length) < TOLERANCE


async def test_keep_holds_every_one_of_many_replies_and_loses_no_token(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """However far each of them is when the weights change, begun or ended."""
    first = await pushed(service, checkpoint(1))
    prompts = [[20 + i, *PROMPT] for i in range(6)]
    tasks = [asyncio.create_task(generate(vllm_url, prompt, 120)) for prompt in prompts]
    reply = await begun(vllm_url, PROMPT, 120)
    second = await pushed(service, checkpoint(2), mode="keep")
    seeds = {str(first): 1, str(second): 2}
    for said in await asyncio.gather(reply.task, *tasks):
        assert len(said.ids) == len(said.logprobs) == 120
        assert said.spans[-1][2] == 120
        for version, start, end in said.spans:
            assert judge.largest_error(checkpoint(seeds[version]), said, start, end) < TOLERANCE


@pytest.mark.case(50)
async def test_wait_lets_replies_end_under_the_old_weights_and_holds_new_calls(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    first = await pushed(service, checkpoint(1))
    reply = await begun(vllm_url, PROMPT, 600)
    push = asyncio.create_task(pushed(service, checkpoint(2), mode="wait"))
    await until_paused(vllm_url, push)
    # At the pool's gate a new call waits; one that is past it queues in the engine. Neither fails.
    held = asyncio.create_task(service.pool.wait_for_gate())
    queued = asyncio.create_task(generate(vllm_url, PROMPT, 8))
    old, second = await reply.task, await push
    await held
    assert (old.finish_reason, old.spans) == ("length", [(str(first), 0, 600)])
    assert judge.largest_error(checkpoint(1), old) < TOLERANCE
    new = await queued
    assert new.spans == [(str(second), 0, 8)]
    assert judge.largest_error(checkpoint(2), new) < TOLERANCE


async def test_abort_cuts_replies_with_what_was_sampled_under_the_old_weights(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    first = await pushed(service, checkpoint(1))
    reply = await begun(vllm_url, PROMPT, OUTLASTING)
    second = await pushed(service, checkpoint(2), mode="abort")
    cut = await reply.task
    assert cut.finish_reason == "abort"
    assert cut.spans == [(str(first), 0, len(cut.ids))]
    assert judge.largest_error(checkpoint(1), cut) < TOLERANCE
    new = await generate(vllm_url, PROMPT, 8)
    assert new.spans == [(str(second), 0, 8)]
    assert judge.largest_error(checkpoint(2), new) < TOLERANCE


def rewrite(
    good: Path, spoiled: Path, *, drop: str = "", add: tuple[str, tuple[int, ...]] | None = None, integers: str = ""
) -> None:
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(good / "model.safetensors")
    tensors.pop(drop, None)
    if add:
        tensors[add[0]] = torch.zeros(add[1])
    if integers:
        tensors[integers] = tensors[integers].to(torch.int32)
    save_file(tensors, spoiled / "model.safetensors")


def shard(good: Path, target: Path) -> None:
    from safetensors.torch import load_file, save_file

    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    tensors = load_file(good / "model.safetensors")
    places = {name: names[number % 2] for number, name in enumerate(sorted(tensors))}
    for file in names:
        save_file({name: tensors[name] for name, place in places.items() if place == file}, target / file)
    (target / "model.safetensors").unlink(missing_ok=True)
    (target / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))


def lose_a_shard(good: Path, spoiled: Path) -> None:
    shard(good, spoiled)
    (spoiled / "model-00002-of-00002.safetensors").unlink()


FILE = "model.safetensors"
KEY, UNKNOWN, UP = (f"model.layers.{name}.weight" for name in ("1.self_attn.k_proj", "9.mlp.up_proj", "0.mlp.up_proj"))
SPOILED: dict[str, tuple[Callable[[Path, Path], object], str]] = {
    "missing": (lambda good, bad: shutil.rmtree(bad), "does not exist on the engine's machine"),
    "empty": (lambda good, bad: (bad / FILE).unlink(), "has no *.safetensors"),
    "cut short": (
        lambda good, bad: (bad / FILE).write_bytes((good / FILE).read_bytes()[:-1000]),
        "is not a whole safetensors file",
    ),
    "not safetensors": (lambda good, bad: (bad / FILE).write_bytes(b"weights"), "is not a whole safetensors file"),
    "lacking a tensor": (lambda good, bad: rewrite(good, bad, drop=KEY), f"lacks {KEY}"),
    "with an unknown tensor": (lambda good, bad: rewrite(good, bad, add=(UNKNOWN, (4, 4))), f"no place for {UNKNOWN}"),
    "with a wrong shape": (
        lambda good, bad: rewrite(good, bad, add=(UP, (4, 128))),
        f"{UP} has shape [4, 128], the model [384, 128]",
    ),
    "with integers": (
        lambda good, bad: rewrite(good, bad, integers="model.norm.weight"),
        "torch.int32 cannot become torch.float32",
    ),
    "lacking a shard": (lose_a_shard, "lacks model-00002-of-00002.safetensors, which its index names"),
}


async def test_a_bad_checkpoint_is_named_and_the_old_weights_go_on(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    """One after the other, and at last the same version with a good one."""
    version = await pushed(service, checkpoint(1))
    for name, (spoil, says) in SPOILED.items():
        bad = tmp_path / name
        shutil.copytree(checkpoint(2), bad)
        spoil(checkpoint(2), bad)
        running = await begun(vllm_url, PROMPT, 60)
        answer = await service.updater.push(version + 1, str(bad))
        assert not answer["applied"], name
        assert says in answer["error"] and "\n" not in answer["error"], name
        assert service.pool.ready() == (True, "")
        for said in (await running.task, await generate(vllm_url, PROMPT, 8)):
            assert said.spans == [(str(version), 0, len(said.ids))], name
            assert judge.largest_error(checkpoint(1), said) < TOLERANCE, name
    assert await pushed(service, checkpoint(2)) == version + 1
    assert judge.largest_error(checkpoint(2), await generate(vllm_url, PROMPT, 8)) < TOLERANCE


async def test_a_bad_checkpoint_sent_to_the_engine_directly_is_refused_with_one_sentence(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """Without the check beforehand, as a client of vLLM's own routes would do it."""
    await pushed(service, checkpoint(1))
    await ask(vllm_url, "/pause?mode=keep")
    await ask(vllm_url, "/start_weight_update")
    status, answer = await ask(vllm_url, "/update_weights", {"update_info": {"path": "/nowhere"}})
    await ask(vllm_url, "/resume")
    assert status == 500
    assert "/nowhere does not exist on the engine's machine" in answer["error"]["message"]
    assert judge.largest_error(checkpoint(1), await generate(vllm_url, PROMPT, 8)) < TOLERANCE
    await pushed(service, checkpoint(2))
    assert judge.largest_error(checkpoint(2), await generate(vllm_url, PROMPT, 8)) < TOLERANCE


@pytest.mark.parametrize("form", ["file", "shards with an index", "shards without", "bfloat16"])
async def test_a_checkpoint_may_come_in_any_form_that_transformers_writes(
    form: str, service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    path, truth = checkpoint(2), checkpoint(2)
    if form == "file":
        path = path / "model.safetensors"
    elif form == "bfloat16":
        path = truth = half_precision(checkpoint(2), tmp_path / "half")
    else:
        shutil.copytree(checkpoint(2), path := tmp_path / "shards")
        shard(checkpoint(2), path)
        if form == "shards without":
            (path / "model.safetensors.index.json").unlink()
    await pushed(service, checkpoint(1))
    await pushed(service, path)
    assert judge.largest_error(truth, await generate(vllm_url, PROMPT, 8)) < TOLERANCE


def half_precision(good: Path, target: Path) -> Path:
    import torch
    from safetensors.torch import load_file, save_file

    shutil.copytree(good, target)
    tensors = {name: tensor.to(torch.bfloat16) for name, tensor in load_file(good / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


async def test_where_there_is_no_mirror_a_delta_is_folded_while_it_is_loaded(
    service: Service, tiny_model: Path, vllm_url: str, judge: Judge, tmp_path: Path
) -> None:
    trainer = Trainer(service, tiny_model, tmp_path / "weights", tmp_path / "none")
    assert [await trainer.publish() for _ in range(3)] == ["full", "delta", "delta"]
    said, state = await generate(vllm_url, list(range(20, 60)), 8), await service.weights.current()
    assert (state.kind, said.spans) == ("delta", [(str(state.version), 0, 8)]) and state.root is not None
    assert judge.largest_error(trainer.save("truth"), said) < TOLERANCE
    assert not trainer.mirror.exists()


async def test_versions_only_grow(service: Service, checkpoint: Callable[[int], Path]) -> None:
    version = await pushed(service, checkpoint(1))
    for stale in (version, version - 1):
        with pytest.raises(Conflict if stale else RequestError, match="version"):
            await service.updater.push(stale, str(checkpoint(2)))


async def test_two_pushes_at_once_never_interleave(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """Two processes share one store; whichever comes second waits, and the engine ends whole under the greater version."""
    async with serving(service.weights, vllm_url) as other:
        version = await service.next_version()
        answers = await asyncio.gather(
            service.updater.push(version, str(checkpoint(1))),
            other.updater.push(version + 1, str(checkpoint(2))),
            return_exceptions=True,
        )
        assert not isinstance(answers[1], BaseException)
        assert answers[1]["applied"]
    said = await generate(vllm_url, PROMPT, 8)
    assert said.spans == [(str(version + 1), 0, 8)]
    assert judge.largest_error(checkpoint(2), said) < TOLERANCE
    assert (await service.updater.status())["current"]["version"] == version + 1


async def test_a_path_outside_the_allowed_folders_is_refused(
    vllm_url: str, weights: WeightStore, checkpoint: Callable[[int], Path], tmp_path: Path
) -> None:
    link = tmp_path / "link"
    link.symlink_to(checkpoint(1))
    async with serving(weights, vllm_url, weights_roots=[tmp_path]) as service:
        for path in (checkpoint(1), link, tmp_path / ".." / "elsewhere"):
            with pytest.raises(RequestError, match="outside the folders"):
                await service.updater.push(await service.next_version(), str(path))


@pytest.mark.parametrize("steps", [1, 2, 3, 4], ids=["paused", "started", "loaded", "labelled"])
async def test_a_replica_left_paused_by_a_killed_push_serves_again(
    steps: int, vllm_url: str, weights: WeightStore, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """The process died between two steps. The next one finds the engine paused and the lock free, and puts it right: back to
    the version the store knows, or on to the new one when the engine holds all of it and says so."""
    async with serving(weights, vllm_url) as service:
        version = await pushed(service, checkpoint(1))
    routes: list[tuple[str, dict[str, Any] | None]] = [
        ("/pause?mode=keep", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": str(checkpoint(2)), "version": version + 1}}),
        ("/finish_weight_update", {"weight_version": str(version + 1)}),
    ]
    for route, body in routes[:steps]:
        assert (await ask(vllm_url, route, body))[0] == 200
    expected = (version, 1) if steps < 4 else (version + 1, 2)
    async with serving(weights, vllm_url) as service:
        await until_serving(service)
        said = await generate(vllm_url, PROMPT, 8)
        assert (await weights.current()).version == expected[0]
        assert said.spans == [(str(expected[0]), 0, 8)]
        assert judge.largest_error(checkpoint(expected[1]), said) < TOLERANCE
        # A start without an update, which vLLM remembers, does not stand in the way of the next push.
        await pushed(service, checkpoint(2))
        assert judge.largest_error(checkpoint(2), await generate(vllm_url, PROMPT, 8)) < TOLERANCE


async def test_an_engine_that_restarted_gets_the_current_weights_before_it_serves(
    vllm_url: str, weights: WeightStore, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """A fresh vLLM calls its weights "default"; what it holds are not the ones that were pushed."""
    async with serving(weights, vllm_url) as service:
        await pushed(service, checkpoint(2))
        version = await pushed(service, checkpoint(1))
        api = WeightApi(service.pool.http.session, service.pool.replicas[0], 30)
        await api.pause("keep")
        await api.load_full(str(checkpoint(2)), version - 1)
        await ask(vllm_url, "/update_weight_version", {"new_version": "default"})
        await api.resume()
    async with serving(weights, vllm_url) as service:
        await until_serving(service)
        said = await generate(vllm_url, PROMPT, 8)
        assert service.pool.replicas[0].weight_version == version
    assert said.spans == [(str(version), 0, 8)]
    assert judge.largest_error(checkpoint(1), said) < TOLERANCE


async def test_a_push_that_was_overtaken_can_load_nothing_any_more(
    service: Service, vllm_url: str, judge: Judge, checkpoint: Callable[[int], Path]
) -> None:
    """Its requests arrive when another process has resumed the engine, which would break it: they are refused by the workers."""
    version = await pushed(service, checkpoint(1))
    stale, fresh = (api_of(service, "store", fence) for fence in (5, 6))
    await stale.claim()
    await fresh.claim()
    await fresh.release()
    with pytest.raises(Claimed, match="another process has taken over since this push began"):
        await stale.claim()
    await ask(vllm_url, "/start_weight_update")
    update = {"path": str(checkpoint(2)), "version": version + 1, "owner": "store", "fence": 5}
    status, answer = await ask(vllm_url, "/update_weights", {"update_info": update})
    assert (status, "another process has taken over" in answer["error"]["message"]) == (500, True)
    status, _ = await ask(vllm_url, "/finish_weight_update", {"weight_version": str(version + 1)})
    assert status == 500
    said = await generate(vllm_url, PROMPT, 8)
    assert said.spans == [(str(version), 0, 8)]
    assert judge.largest_error(checkpoint(1), said) < TOLERANCE


async def test_an_engine_that_another_service_has_claimed_takes_no_push(
    service: Service, checkpoint: Callable[[int], Path]
) -> None:
    await pushed(service, checkpoint(1))
    other = api_of(service, "another store", 1)
    await other.claim()
    answer = await service.updater.push(await service.next_version(), str(checkpoint(2)))
    assert not answer["applied"]
    assert "another service changes this engine's weights" in answer["error"]
    await other.release()
    await pushed(service, checkpoint(2))


async def test_an_engine_without_a_gpu_says_that_nccl_needs_one(
    service: Service, vllm_url: str, checkpoint: Callable[[int], Path]
) -> None:
    if (await api_of(service).world_size(), shutil.which("nvidia-smi")) == (1, None):
        where = {"master_address": "127.0.0.1", "master_port": 29600, "packed": True}
        with pytest.raises(EngineFailed, match="nccl needs engines on GPUs, this one runs on cpu"):
            await service.updater.join_group("", 2, where)
    answer_of_none = Transfer("none", 2, ["lm_head.weight"], ["float32"], [[4, 4]])
    with pytest.raises(StepRefused, match="the engine is not in the trainer's NCCL group"):
        await api_of(service).check_transfer(answer_of_none)
    await pushed(service, checkpoint(1))


def api_of(service: Service, owner: str = "", fence: int = 0) -> WeightApi:
    claim = Claim(owner, fence, 60.0) if owner else None
    return WeightApi(service.pool.http.session, service.pool.replicas[0], 60, claim)


async def test_weights_that_cannot_be_named_keep_an_engine_out(
    vllm_url: str, weights: WeightStore, checkpoint: Callable[[int], Path]
) -> None:
    """The store lost the path: rather no engine than tokens with a wrong version. A push mends it."""
    async with serving(weights, vllm_url) as service:
        version = await pushed(service, checkpoint(1))
    await weights.advance(WeightState(version + 5))
    async with serving(weights, vllm_url) as service:
        ready, reason = service.pool.ready()
        assert not ready
        assert f"it holds weights '{version}', not {version + 5}" in reason
        await pushed(service, checkpoint(1))
        assert service.pool.ready() == (True, "")


async def until_serving(service: Service) -> None:
    deadline = time.monotonic() + 120
    while not service.pool.ready()[0]:
        assert time.monotonic() < deadline, service.pool.ready()[1]
        await asyncio.sleep(0.05)


async def test_tied_embeddings_follow(tmp_path: Path, weights: WeightStore, judge: Judge) -> None:
    """A second engine, whose output layer shares the embedding's weight: on a CPU vLLM would keep the old one there."""
    models = [tiny(tmp_path, seed, tie_word_embeddings=True) for seed in range(3)]
    with running_vllm(models[0], tmp_path) as server:
        async with serving(weights, server.url) as service:
            first = await generate(server.url, PROMPT, 8)
            assert first.spans == [("0", 0, 8)]
            assert judge.largest_error(models[0], first) < TOLERANCE
            for seed in (1, 2):
                version = await pushed(service, models[seed])
                said = await generate(server.url, LONG_PROMPT, 24)
                assert said.spans == [(str(version), 0, 24)]
                assert judge.largest_error(models[seed], said) < TOLERANCE
            await check_both_names(service, server.url, judge, models[1], tmp_path)


async def check_both_names(service: Service, url: str, judge: Judge, model: Path, tmp_path: Path) -> None:
    """A trainer's state dict names the shared weight twice: fine when the two are equal, refused when they differ."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(model / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "both.safetensors")
    await pushed(service, tmp_path / "both.safetensors")
    assert judge.largest_error(model, await generate(url, PROMPT, 8)) < TOLERANCE
    tensors["lm_head.weight"] += 1
    save_file(tensors, tmp_path / "torn.safetensors")
    answer = await service.updater.push(await service.next_version(), str(tmp_path / "torn.safetensors"))
    assert "lm_head.weight differs from model.embed_tokens.weight" in answer["error"]


async def test_an_adapter_for_an_engine_without_one_is_refused(service: Service, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="adapters: none; start vLLM with --enable-lora"):
        await service.updater.push(await service.next_version(), str(tmp_path), kind="lora")
    assert service.pool.ready() == (True, "")


def tiny(folder: Path, seed: int, *, tie_word_embeddings: bool = False) -> Path:
    from examples.demo.tiny_model import make_tiny_model

    return make_tiny_model(folder / f"model{seed}", seed=seed, tie_word_embeddings=tie_word_embeddings)
