"""A process that dies, or stands still, in the middle of a push: another one takes over, and every replica ends on one version.

The victim is a `verbatim serve` of its own, killed with SIGKILL while an engine holds one step of the push; the survivor is a pool
with its updater on the same store. The victim's lock is made to run out rather than waited for. In the end an engine dies instead.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis

from contract.deltas import has_digests, read_chain
from proxy.engine.weights.keeper import PushLock
from proxy.engine.weights.replica import Guard, Push, ReplicaLeft, update_replica
from proxy.engine.weights.vllm import Claim, WeightApi
from proxy.errors import Conflict, StoreUnavailable
from proxy.store import keys
from proxy.store.service import WeightStore
from tests.support.engine.delta_versions import write_chain
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.engine.scripted_weights import Hold, Step
from tests.support.engine.weight_fixtures import Service, serving, until
from tests.support.service.redis_server import Store
from tests.support.service.verbatim_process import TRAINER, Serving

pytestmark = pytest.mark.usefixtures("often_visited")


@pytest.fixture
def checkpoints(tmp_path: Path) -> Callable[[int], str]:
    """The path of a version's checkpoint, which is there."""

    def made(version: int) -> str:
        path = tmp_path / f"version-{version}"
        path.mkdir(exist_ok=True)
        return str(path)

    return made


Versions = Callable[[int], tuple[str, str]]


@pytest.fixture
def versions(kind: str, tmp_path: Path, checkpoints: Callable[[int], str]) -> Versions:
    """The path and the kind of a version, of which the first is whole."""
    if kind == "full":
        return lambda version: (checkpoints(version), "full")
    states = write_chain(tmp_path, 3)
    return lambda version: (str(states[version - 1].folder), "full" if version == 1 else "delta")


class Victim:
    """A service and the push that it is told to make."""

    def __init__(self, serving: Serving) -> None:
        self._serving = serving
        self.answer: dict[str, Any] | None = None

    def push(self, version: int, path: str, kind: str = "full") -> None:
        self._thread = threading.Thread(target=self._ask, args=({"version": version, "path": path, "kind": kind},))
        self._thread.start()

    def send(self, number: int) -> None:
        self._serving.send(number)

    def join(self) -> None:
        self._thread.join(60)
        assert not self._thread.is_alive()

    def _ask(self, body: dict[str, Any]) -> None:
        headers = {"Authorization": f"Bearer {TRAINER}"}
        try:
            self.answer = httpx.post(f"{self._serving.url}/weights", json=body, headers=headers, timeout=120).json()
        except httpx.HTTPError:
            self.answer = None


@pytest.fixture
def victim(engines: list[ScriptedEngine], redis_url: str, tmp_path: Path) -> Iterator[Victim]:
    where = [flag for engine in engines for flag in ("--engine", engine.url)]
    with Serving(*where, "--redis", redis_url, data_dir=tmp_path / "victim") as service:
        yield Victim(service)


def run_out(redis_url: str) -> None:
    """As when the lock's holder has not renewed it for as long as it lasts."""
    with redis.Redis.from_url(redis_url) as client:
        client.delete(keys.weights("lock", ""))


async def until_all_serve(service: Service, engines: list[ScriptedEngine], version: int) -> None:
    def settled() -> bool:
        served = all(replica.healthy and replica.weight_version == version for replica in service.pool.replicas)
        return served and all(engine.weights.label == str(version) and not engine.weights.paused for engine in engines)

    def standing() -> object:
        return [(engine.weights.label, engine.weights.paused, engine.weights.loaded) for engine in engines], [
            (replica.healthy, replica.reason, replica.weight_version) for replica in service.pool.replicas
        ]

    await until(settled, standing)


def assert_consistent(engines: list[ScriptedEngine], version: int) -> None:
    for engine in engines:
        assert engine.weights.broken == [], "weights were changed while it sampled"
        assert engine.weights.loaded["whole"]
        assert engine.weights.loaded["version"] == version
        labels = [int(label) for label in engine.weights.labels]
        assert labels == sorted(labels), "versions only grow"


STEPS: list[tuple[Step, bool]] = [
    ("prepare", True),
    ("check", False),
    ("pause", False),
    ("pause", True),
    ("start", True),
    ("update", False),
    ("update", True),
    ("finish", True),
    ("resume", False),
]
LEFT_BEHIND: list[tuple[Step, bool]] = [
    ("check", False),
    ("pause", True),
    ("update", False),
    ("update", True),
    ("resume", False),
]


KINDS = ("full", "delta")


def cell(step: Step, done: bool, held: int, kind: str) -> Any:
    standing = "one replica is behind" if held == 1 else "all stand there"
    return pytest.param(step, done, held, kind, id=f"{step}-{'done' if done else 'sent'}-{standing}-{kind}")


@pytest.mark.parametrize(
    ("step", "done", "held", "kind"),
    [cell(*at, held=2, kind=kind) for at in STEPS for kind in KINDS] + [cell(*at, held=1, kind="delta") for at in LEFT_BEHIND],
)
async def test_a_push_whose_process_is_killed_is_finished_or_undone_by_another(
    step: Step,
    done: bool,
    held: int,
    victim: Victim,
    engines: list[ScriptedEngine],
    weights: WeightStore,
    redis_url: str,
    versions: Versions,
) -> None:
    """When a replica has come so far as to be labelled, the others follow it; otherwise all go back to what they had."""
    async with serving(weights, *(engine.url for engine in engines)) as service:
        assert (await service.updater.push(1, *versions(1)))["applied"]
        holds = [engine.weights.hold(step, done=done) for engine in engines[:held]]
        victim.push(2, *versions(2))
        await until(lambda: all(hold.reached.is_set() for hold in holds), lambda: victim.answer)
        if held == 1:
            await until(lambda: engines[1].weights.labels[-1] == "2" and not engines[1].weights.paused, lambda: victim.answer)
        victim.send(signal.SIGKILL)
        victim.join()
        assert victim.answer is None
        run_out(redis_url)
        expected = 2 if held == 1 or (step, done) in [("finish", True), ("resume", False)] else 1
        if not done:
            # What the dead process sent last reaches the engine only after the other has put it right.
            await until_all_serve(service, engines, expected)
        release(holds)
        await until_all_serve(service, engines, expected)
        await assert_current(weights, expected, *versions(expected))
        assert_consistent(engines, expected)
        assert (await service.updater.push(expected + 1, *versions(expected + 1)))["applied"]
        await until_all_serve(service, engines, expected + 1)
        assert_consistent(engines, expected + 1)


async def assert_current(weights: WeightStore, version: int, path: str, kind: str) -> None:
    """And with a delta's root, which an engine that comes late has to find."""
    state, root = await weights.current(), read_chain(Path(path)).root if has_digests(Path(path)) or kind == "delta" else None
    assert (state.version, state.path, state.kind, state.root) == (version, path, kind, root)


def release(holds: list[Hold]) -> None:
    for hold in holds:
        hold.released.set()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("step", "done"), [pytest.param(*at, id=f"{at[0]}-{'done' if at[1] else 'sent'}") for at in STEPS])
async def test_an_engine_that_is_killed_in_a_push_holds_the_current_weights_when_it_serves_again(
    step: Step, done: bool, weights: WeightStore, versions: Versions
) -> None:
    with ScriptedEngine() as engine:
        async with serving(weights, engine.url) as service:
            assert (await service.updater.push(1, *versions(1)))["applied"]
            hold, port = engine.weights.hold(step, done=done), engine.port
            push = asyncio.create_task(service.updater.push(2, *versions(2)))
            await until(hold.reached.is_set, engine.paths)
            await asyncio.to_thread(engine.stop)
            answer, expected = await push, 2 if step == "resume" else 1
            assert answer["applied"] == (expected == 2) and not next(iter(answer["replicas"].values()))["ok"]
            with ScriptedEngine().start(port) as again:
                await until_all_serve(service, [again], expected)
                assert_consistent([again], expected)
                await assert_current(weights, expected, *versions(expected))


async def test_a_process_that_stood_still_cannot_go_on_with_its_push_once_another_has_taken_over(
    victim: Victim, engines: list[ScriptedEngine], weights: WeightStore, redis_url: str, checkpoints: Callable[[int], str]
) -> None:
    """It is stopped with its update on the way; the other resumes the engines and pushes; then it goes on."""
    async with serving(weights, *(engine.url for engine in engines)) as service:
        assert (await service.updater.push(1, checkpoints(1)))["applied"]
        holds = [engine.weights.hold("update", done=False) for engine in engines]
        victim.push(2, checkpoints(2))
        await until(lambda: all(hold.reached.is_set() for hold in holds), lambda: victim.answer)
        victim.send(signal.SIGSTOP)
        run_out(redis_url)
        await until_all_serve(service, engines, 1)
        assert (await service.updater.push(3, checkpoints(3)))["applied"]
        release(holds)
        victim.send(signal.SIGCONT)
        await asyncio.to_thread(victim.join)
        assert victim.answer is not None
        assert not victim.answer.get("applied")
        await until_all_serve(service, engines, 3)
        assert_consistent(engines, 3)
        assert (await weights.current()).version == 3
        assert [state.version for state in await weights.history()] == [3, 1]


async def test_a_replica_whose_answers_make_no_sense_does_not_end_the_push_of_the_others(
    engines: list[ScriptedEngine], weights: WeightStore, checkpoints: Callable[[int], str]
) -> None:
    """It ended the push, and gave the lock to the next one, while they still loaded."""
    odd, other = engines
    async with serving(weights, *(engine.url for engine in engines)) as service:
        odd.weights.loaded["updates"] = "many"
        hold = other.weights.hold("update", done=False)
        pushing = asyncio.ensure_future(service.updater.push(1, checkpoints(1)))
        await until(hold.reached.is_set, lambda: pushing)
        hold.released.set()
        answer = await pushing
        assert answer["applied"]
        told = {name: replica.get("error", "") for name, replica in answer["replicas"].items()}
        names = {
            engine.url: replica.name for engine in engines for replica in service.pool.replicas if replica.url == engine.url
        }
        assert told[names[other.url]] == ""
        assert "ValueError: invalid literal for int() with base 10: 'many'" in told[names[odd.url]]
        assert [replica.healthy for replica in service.pool.replicas] == [False, True]
        assert_consistent([other], 1)


async def test_a_process_whose_lock_ran_out_does_not_resume_what_may_be_anothers(
    weights: WeightStore, checkpoints: Callable[[int], str]
) -> None:
    """It stood still after its pause, and finds the old weights still whole: the other has only just paused the engine, too."""

    def lost() -> None:
        if taken.is_set():
            raise StoreUnavailable("the push lock could not be renewed in the store")

    taken = asyncio.Event()
    with ScriptedEngine() as engine:
        async with serving(weights, engine.url) as service:
            (replica,) = service.pool.replicas
            stale, fresh = (WeightApi(service.pool.http.session, replica, 60, Claim("store", fence, 60.0)) for fence in (5, 6))
            hold = engine.weights.hold("pause", done=True)
            update = asyncio.create_task(update_replica(stale, replica, Push(1, checkpoints(1)), Guard(lost)))
            await until(hold.reached.is_set, engine.paths)
            await fresh.claim()
            taken.set()
            hold.released.set()
            with pytest.raises(ReplicaLeft, match="could not be renewed"):
                await update
            assert "/resume" not in engine.paths()
            await fresh.release()


async def test_a_lock_that_runs_out_goes_to_the_next_with_a_greater_fence(weights: WeightStore) -> None:
    """The first holder can neither renew it nor make its version current, and is told so."""
    async with PushLock(weights, "", 0.2, 0.0) as stale:
        stale._renewal.cancel()
        async with PushLock(weights, "", 30.0, 20.0) as fresh:
            assert fresh.fence > stale.fence
            with pytest.raises(StoreUnavailable, match="could not be renewed"):
                stale.check()
            fresh.check()
            assert not await weights.lock("stale", 30.0, "", stale.fence)
            with pytest.raises(Conflict, match="another weight push is running"):
                async with PushLock(weights, "", 30.0, 0.0):
                    pass


async def test_a_service_on_another_store_leaves_an_engine_alone_while_it_is_being_updated(
    engines: list[ScriptedEngine],
    weights: WeightStore,
    redis_url: str,
    checkpoints: Callable[[int], str],
    other_store: WeightStore,
) -> None:
    """Its pause is the other one's: it is neither resumed nor served until that push has ended, and then it is taken as it is."""
    engine = engines[0]
    async with serving(weights, engine.url) as pushing, serving(other_store, engine.url) as beside:
        assert beside.pool.ready() == (True, "")
        hold = engine.weights.hold("update", done=False)
        push = asyncio.create_task(pushing.updater.push(1, checkpoints(1)))
        await until(lambda: hold.reached.is_set(), lambda: engine.paths())
        replica = beside.pool.replicas[0]
        await until(lambda: "another service changes" in replica.reason, lambda: replica.reason)
        assert not replica.healthy
        assert engine.weights.paused
        refused = await beside.updater.push(7, checkpoints(7))
        assert not refused["applied"]
        assert "another service changes" in refused["error"]
        assert engine.weights.paused
        hold.released.set()
        assert (await push)["applied"]
        await until(lambda: replica.healthy and replica.weight_version == 1, lambda: replica.reason)
        assert (await other_store.current()).version == 1
        assert_consistent([engine], 1)


@pytest.fixture
async def other_store() -> AsyncIterator[WeightStore]:
    from tests.support.service.redis_server import running_redis

    with running_redis() as server:
        store = Store.at(server.url)
        yield store.weights
        await store.connection.close()
