"""The stages of a node hold each other back as they should, and give back what they were lent exactly once."""

from __future__ import annotations

import asyncio

from hypothesis import given
from hypothesis import strategies as st

from contract.tasks import EvaluatorSpec, HarnessSpec, RuntimeSpec, Task
from rollout.stages import Capacity, Permit, Slots, Stage, Stages


def task(cpus: float = 1.0, memory_mb: int = 100, *, evaluated: bool = False) -> Task:
    evaluator = EvaluatorSpec("command") if evaluated else None
    return Task(
        "do it", HarnessSpec("pi"), task_id="t", evaluator=evaluator, runtime=RuntimeSpec(cpus=cpus, memory_mb=memory_mb)
    )


async def test_a_stage_lets_in_as_many_as_it_has_places_and_the_next_when_one_leaves() -> None:
    stage = Stage(2)
    first, _ = await stage.enter(), await stage.enter()
    third = asyncio.create_task(stage.enter())
    await asyncio.sleep(0)
    assert (stage.busy, stage.waiting) == (2, 1)
    first.leave()
    await third
    assert (stage.busy, stage.waiting) == (2, 0)


async def test_whoever_gives_up_waiting_takes_no_place() -> None:
    stage = Stage(1)
    held = await stage.enter()
    waiting = asyncio.create_task(stage.enter())
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.wait([waiting])
    held.leave()
    assert (stage.busy, stage.waiting) == (0, 0)
    async with stage.entered():
        assert stage.busy == 1
    assert stage.busy == 0


def test_a_permit_is_given_back_once_however_often_it_is_left() -> None:
    left: list[int] = []
    permit = Permit(lambda: left.append(1))
    permit.leave()
    permit.leave()
    assert left == [1]


@given(st.lists(st.tuples(st.integers(1, 8), st.integers(1, 4096), st.booleans()), max_size=20), st.randoms())
def test_what_was_reserved_comes_back_whole_in_any_order(demands: list[tuple[int, int, bool]], random: object) -> None:
    capacity = Capacity(1000.0, 1 << 20)
    permits = [capacity.reserve(task(cpus, memory, evaluated=fresh)) for cpus, memory, fresh in demands]
    taken = sum(cpus * (1 + fresh) for cpus, _, fresh in demands)
    assert capacity.free_cpus == 1000.0 - taken
    random.shuffle(permits)  # type: ignore[attr-defined]
    for permit in (*permits, *permits):
        permit.leave()
    assert (capacity.free_cpus, capacity.free_memory_mb) == (1000.0, 1 << 20)


@given(st.lists(st.sampled_from([0.1, 0.3, 0.7, 1.1, 1 / 3]), max_size=20), st.randoms())
def test_parts_of_cpus_come_back_whole_too(demands: list[float], random: object) -> None:
    capacity = Capacity(4.0, 1 << 20)
    permits = [capacity.reserve(task(cpus)) for cpus in demands]
    random.shuffle(permits)  # type: ignore[attr-defined]
    for permit in permits:
        permit.leave()
    assert capacity.free_cpus == 4.0


def test_an_evaluation_in_a_runtime_of_its_own_is_part_of_the_demand() -> None:
    assert task(2.0, 300).demand == (2.0, 300)
    assert task(2.0, 300, evaluated=True).demand == (4.0, 600)
    larger = EvaluatorSpec("command", runtime=RuntimeSpec(cpus=8.0, memory_mb=1000))
    assert Task("", HarnessSpec("pi"), task_id="t", evaluator=larger, runtime=RuntimeSpec(cpus=1.0, memory_mb=10)).demand == (
        9.0,
        1010,
    )
    left = EvaluatorSpec("command", fresh_runtime=False)
    assert Task("", HarnessSpec("pi"), task_id="t", evaluator=left, runtime=RuntimeSpec(cpus=1.0, memory_mb=10)).demand == (
        1.0,
        10,
    )


async def test_no_more_are_ahead_of_their_end_than_run_slots_and_the_ready_buffer_together() -> None:
    stages = Stages(Slots(prepare=1, ready=2, run=3, evaluate=1), Capacity(1, 1))
    for _ in range(5):
        await stages.ahead.enter()
    sixth = asyncio.create_task(stages.ahead.enter())
    await asyncio.sleep(0)
    assert stages.ahead.waiting == 1
    sixth.cancel()
