"""What the store promises nodes and servers, over a plain Redis and a cluster of three.

A lease of 0 seconds has run out when it is looked at a millisecond later: so a node that "gives no sign of life" needs no waiting.
"""

from __future__ import annotations

import asyncio
import time

import pytest

from contract.attempts import AttemptId, Failure, FailureRecord, Room, Superseded, TakenRollout, Verdict
from contract.tasks import EvaluatorSpec, Exec, HarnessSpec, Upload
from proxy.errors import Conflict, NotFound
from proxy.store.tasks import keys
from tests.support.runtimes.rollout_stores import ROOM, WELL, Node, Stores, a_task, sized

RAN_OUT = 0.001
BROKEN = FailureRecord(Failure.BAD_RUNTIME, "no image", "a log")


async def lost(node: Node) -> TakenRollout:
    """What it takes of another that fell silent."""
    await asyncio.sleep(2 * RAN_OUT)
    return await node.must_take(RAN_OUT)


async def test_a_rollout_goes_from_the_queue_to_its_end(stores: Stores) -> None:
    await stores.submit(num_samples=1, callback_url="http://x")
    node = stores.node("a")
    taken = await node.must_take()
    assert taken.attempt == AttemptId("t", 0, 1) and taken.attempt.session_id == "t.0.1"
    assert (taken.state.status, taken.state.node, taken.resumed) == ("preparing", "a", False)
    await node.work.advance(taken.attempt, "ready", time.time(), {})
    await node.work.advance(taken.attempt, "running", time.time(), {"session_id": "t.0.1"})
    await node.work.advance(taken.attempt, "evaluating", time.time(), {"exit_code": 0, "calls": 3, "logs": "a:/logs/t.0.1"})
    await node.end(taken.attempt)
    state = await stores.rollout()
    assert (state.status, state.verdict, state.session_id, state.exit_code) == ("completed", WELL, "t.0.1", 0)
    assert (state.calls, state.logs) == (3, "a:/logs/t.0.1")
    reached = ["preparing", "ready", "running", "evaluating", "concluding", "completed"]
    assert sorted(state.times, key=lambda status: state.times[status]) == ["queued", *reached]
    task = await stores.tasks.load("t")
    assert (task.status, dict(task.counts.by_status), task.counts.usable) == ("completed", {"completed": 1}, 1)
    assert task.ended_at is not None and task.callback is not None and task.callback.next_try_at is not None
    assert await stores.kinds() == ["task.created", *(f"rollout.{status}" for status in reached), "task.ended"]
    assert await node.take() is None


async def test_what_was_submitted_comes_back_whole(stores: Stores) -> None:
    uploads = (Upload("a", b"\x00\xff"), Exec("make", retries=2), Upload("b", source="http://x/y.tar", unpack=True))
    task = a_task(
        prepare=uploads,
        evaluator=EvaluatorSpec("http", {"files": {"a": "b", "n": 1}}, prepare=(Exec("true"), Upload("c", b"1"))),
        harness=HarnessSpec("pi", skills=(Upload("s", b"tar"),)),
        metadata={"nested": [1, None, {"x": 2.5}]},
    )
    state, new = await stores.tasks.submit(task, b"d", time.time())
    assert new and state.task == task
    assert (await stores.node("a").must_take()).task == task
    (listed,), _ = await stores.tasks.list_tasks(status=None, limit=10, cursor=None)
    assert [getattr(step, "content", None) for step in listed.task.prepare] == [b"", None, None]


async def test_a_task_that_is_submitted_again_is_left_as_it_is(stores: Stores) -> None:
    first, new = await stores.tasks.submit(a_task(num_samples=2), b"one", 1.0)
    again, anew = await stores.tasks.submit(a_task(num_samples=2), b"one", 2.0)
    assert new and not anew and again == first
    with pytest.raises(Conflict, match="another body"):
        await stores.tasks.submit(a_task(num_samples=3), b"two", 3.0)
    assert len(await stores.tasks.load_rollouts("t")) == 2


async def test_what_is_not_there_is_said_to_be_missing(stores: Stores) -> None:
    with pytest.raises(NotFound):
        await stores.tasks.load("x")
    with pytest.raises(NotFound):
        await stores.tasks.load_rollouts("x")
    with pytest.raises(NotFound):
        await stores.tasks.cancel("x", 1.0)
    with pytest.raises(NotFound):
        await anext(stores.tasks.watch_events("x"))


async def test_the_most_urgent_goes_first_and_among_equals_the_oldest(stores: Stores) -> None:
    """c waits in another queue than a and d, of the same priority."""
    await stores.submit("a")
    await stores.submit("b", priority=90)
    await stores.submit("c", runtime=sized(2.0))
    await stores.submit("d")
    node = stores.node("n")
    assert [(await node.must_take()).attempt.task_id for _ in "abcd"] == ["b", "a", "c", "d"]


async def test_a_node_takes_only_what_it_has_room_for(stores: Stores) -> None:
    await stores.submit("wide", runtime=sized(8.0), priority=90)
    await stores.submit("large", runtime=sized(1.0, 8192), priority=80)
    await stores.submit("boxed", runtime=sized(kind="docker"), priority=70)
    judged = EvaluatorSpec("command", runtime=sized(kind="apptainer"))
    await stores.submit("judged", evaluator=judged, priority=65)
    await stores.submit("labelled", labels={"zone": "b", "disk": "fast"}, priority=60)
    await stores.submit("plain")
    small = stores.node("small", Room({"zone": "b"}, frozenset({"local"}), 2.0, 2048))
    assert (await small.must_take()).attempt.task_id == "plain"
    assert await small.take() is None
    every = stores.node("every", Room({"zone": "b", "disk": "fast"}, frozenset({"local", "docker", "apptainer"}), 8.0, 8192))
    taken = [(await every.must_take()).attempt.task_id for _ in range(5)]
    assert taken == ["wide", "large", "boxed", "judged", "labelled"]


async def test_a_rollout_of_a_silent_node_is_anothers_next_attempt(stores: Stores) -> None:
    await stores.submit()
    silent, other = stores.node("silent"), stores.node("other")
    first = await silent.must_take()
    await silent.work.advance(first.attempt, "running", time.time(), {"session_id": "t.0.1"})
    assert await other.take() is None
    second = await lost(other)
    assert second.attempt == AttemptId("t", 0, 2) and second.state.session_id is None
    (failure,) = second.state.failures
    assert (failure.failure, failure.look) == (Failure.NODE_LOST, "silent")
    assert await silent.beat(first.attempt) == [first.attempt]
    for step in (
        silent.work.advance(first.attempt, "evaluating", time.time(), {}),
        silent.work.conclude(first.attempt, WELL, time.time()),
        silent.work.finish(first.attempt, time.time()),
        silent.work.give_up(first.attempt, BROKEN, time.time(), retry=True),
        silent.work.put_back(first.attempt, time.time()),
    ):
        with pytest.raises(Superseded):
            await step
    assert await stores.tasks.claim_abandoned(10, time.time()) == [first.attempt]
    await stores.tasks.drop_abandoned(first.attempt)
    assert await stores.tasks.claim_abandoned(10, time.time() + 3600) == []
    await other.end(second.attempt)
    assert (await stores.tasks.load("t")).status == "completed"


async def test_a_node_that_has_its_rollout_again_changes_nothing_by_the_attempt_before(stores: Stores) -> None:
    await stores.submit()
    node = stores.node("a")
    first = await node.must_take()
    await node.work.put_back(first.attempt, time.time())
    second = await node.must_take()
    assert (first.attempt.attempt, second.attempt.attempt) == (1, 2)
    for step in (
        node.work.advance(first.attempt, "running", time.time(), {}),
        node.work.conclude(first.attempt, WELL, time.time()),
        node.work.finish(first.attempt, time.time()),
    ):
        with pytest.raises(Superseded):
            await step
    assert await node.beat(first.attempt, second.attempt) == [first.attempt]
    assert (await stores.rollout()).status == "preparing"


async def test_a_sign_of_life_begins_the_time_of_silence_anew(stores: Stores) -> None:
    task = await stores.submit()
    node = stores.node("a")
    taken = await node.must_take()
    await asyncio.sleep(0.2)
    beaten = time.monotonic()
    await node.beat(taken.attempt)
    key = f"{keys.BASE}:q:{keys.queue_of(task)}"
    look = "return redis.call('XPENDING', KEYS[1], 'nodes', '-', '+', 10)"
    ((_, _, silent_ms, _),) = await stores.connection.execute("EVAL", look, 1, key, key=key)
    assert silent_ms <= 1000 * (time.monotonic() - beaten) + 1


async def test_a_node_that_beats_keeps_what_it_has(stores: Stores) -> None:
    """The lease that the other node looks at is longer than all of this can take; the entry's idle time is set back by the beat."""
    await stores.submit()
    node, other = stores.node("a"), stores.node("b")
    taken = await node.must_take()
    assert await node.beat(taken.attempt) == []
    assert await other.take(60.0) is None
    assert [state.name for state in await stores.tasks.list_nodes()] == ["a"]
    await node.work.leave()
    assert await stores.tasks.list_nodes() == []


async def test_a_node_loses_nothing_before_its_own_lease_has_run_out(stores: Stores) -> None:
    """Nor to a server; and it does once it told of a shorter one."""
    await stores.submit()
    patient, hasty = stores.node("patient"), stores.node("hasty")
    patient.lease_seconds = 3600.0
    await patient.beat()
    await patient.must_take()
    await asyncio.sleep(2 * RAN_OUT)
    assert await hasty.take(RAN_OUT) is None
    assert await stores.node("server").work.recover("server", RAN_OUT, time.time()) is None
    patient.lease_seconds = RAN_OUT
    await patient.beat()
    assert (await lost(hasty)).attempt.attempt == 2


async def test_a_task_may_want_rollouts_of_lost_nodes_to_fail(stores: Stores) -> None:
    await stores.submit(on_lost_node="fail")
    await stores.node("a").must_take()
    await asyncio.sleep(2 * RAN_OUT)
    assert await stores.node("b").take(RAN_OUT) is None
    state = await stores.rollout()
    assert state.status == "failed" and state.verdict is not None and state.verdict.failure is not None
    assert state.verdict.failure.failure is Failure.NODE_LOST
    assert (await stores.tasks.load("t")).status == "completed"
    ((task, closing),) = await stores.tasks.claim_unclosed(10, time.time())
    assert (task.task_id, closing.attempt, closing.status) == ("t", 1, "failed")


async def test_attempts_on_lost_nodes_come_to_an_end(stores: Stores) -> None:
    await stores.submit(max_attempts=2)
    await stores.node("a").must_take()
    assert (await lost(stores.node("b"))).attempt.attempt == 2
    await asyncio.sleep(2 * RAN_OUT)
    assert await stores.node("c").take(RAN_OUT) is None
    assert (await stores.rollout()).status == "failed"


async def test_a_rollout_whose_verdict_stands_is_finished_and_never_run_again(stores: Stores) -> None:
    await stores.submit()
    silent, other = stores.node("a"), stores.node("b")
    first = await silent.must_take()
    await silent.work.conclude(first.attempt, WELL, time.time())
    resumed = await lost(other)
    assert resumed.resumed and resumed.attempt == first.attempt and resumed.state.verdict == WELL
    await other.work.finish(resumed.attempt, time.time())
    await silent.work.finish(first.attempt, time.time())
    assert (await stores.tasks.load("t")).counts.usable == 1
    assert (await stores.kinds()).count("rollout.completed") == 1


async def test_a_server_finishes_what_no_node_is_there_to_take(stores: Stores) -> None:
    await stores.submit("verdict")
    await stores.submit("failing", on_lost_node="fail")
    await stores.submit("waiting")
    node = stores.node("a")
    first = await node.must_take()
    await node.work.conclude(first.attempt, WELL, time.time())
    await node.must_take()
    await node.must_take()
    await asyncio.sleep(2 * RAN_OUT)
    server = stores.node("server")
    taken = await server.work.recover("server", RAN_OUT, time.time())
    assert taken is not None and taken.resumed and taken.attempt.task_id == "verdict"
    await server.work.finish(taken.attempt, time.time())
    assert await server.work.recover("server", RAN_OUT, time.time()) is None
    assert (await stores.rollout("failing")).status == "failed"
    assert (await stores.rollout("waiting")).status == "preparing"
    assert (await lost(stores.node("b"))).attempt == AttemptId("waiting", 0, 2)


async def test_what_cannot_be_done_keeps_nothing_else_from_being_done(stores: Stores) -> None:
    """More rollouts wait for a node than are looked at together, and more tasks for their callbacks; one of each is behind them."""
    held = [f"t{number:03}" for number in range(101)]
    node = stores.node("a")
    for task_id in held:
        await stores.submit(task_id, callback_url="http://x")
        await node.must_take()
    await stores.submit("last")
    last = await node.must_take()
    await node.work.conclude(last.attempt, WELL, time.time())
    await asyncio.sleep(2 * RAN_OUT)
    server = stores.node("server")
    taken = await server.work.recover("server", RAN_OUT, time.time())
    assert taken is not None and taken.attempt == last.attempt
    for task_id in held:
        await stores.tasks.cancel(task_id, 1.0)
    await server.work.finish(last.attempt, 2.0)
    assert await stores.tasks.forget(2.0, 10) == 1
    assert len((await stores.tasks.list_tasks(status=None, limit=200, cursor=None))[0]) == len(held)


async def test_a_failure_that_is_not_the_agents_is_tried_again_elsewhere_first(stores: Stores) -> None:
    await stores.submit(max_attempts=2)
    bad, good = stores.node("bad"), stores.node("good")
    await bad.beat()
    await good.beat()
    first = await bad.must_take()
    assert await bad.work.give_up(first.attempt, BROKEN, time.time(), retry=True)
    assert await bad.work.give_up(first.attempt, BROKEN, time.time(), retry=True)
    assert await bad.take() is None
    second = await good.must_take()
    assert (second.attempt.attempt, second.state.failures) == (2, (BROKEN,))
    assert not await good.work.give_up(second.attempt, BROKEN, time.time(), retry=True)
    await good.end(second.attempt, Verdict("failed", failure=BROKEN))
    assert (await stores.rollout()).status == "failed"
    assert (await stores.tasks.load_totals())["failure:bad_runtime"] == 2


async def test_a_node_that_is_alone_tries_again_itself(stores: Stores) -> None:
    await stores.submit()
    node = stores.node("a")
    await node.beat()
    first = await node.must_take()
    assert await node.work.give_up(first.attempt, BROKEN, time.time(), retry=True)
    assert (await node.must_take()).attempt.attempt == 2


async def test_what_failed_is_not_left_to_a_node_that_could_never_take_it(stores: Stores) -> None:
    """What is behind it would wait as well."""
    await stores.submit(num_samples=2, runtime=sized(cpus=8.0))
    node, small = stores.node("a"), stores.node("small")
    await node.beat()
    await small.beat()
    first, second = await node.must_take(), await node.must_take()
    assert await node.work.give_up(first.attempt, BROKEN, time.time(), retry=True)
    assert await node.work.give_up(second.attempt, BROKEN, time.time(), retry=True)
    again = [(await node.must_take()).attempt for _ in range(2)]
    assert [(attempt.index, attempt.attempt) for attempt in again] == [(0, 2), (1, 2)]


async def test_what_a_node_puts_back_costs_no_attempt(stores: Stores) -> None:
    await stores.submit(max_attempts=1)
    node = stores.node("a")
    for _ in range(3):
        taken = await node.must_take()
        await node.work.put_back(taken.attempt, time.time())
    taken = await node.must_take()
    assert taken.attempt.attempt == 4
    assert not await node.work.give_up(taken.attempt, BROKEN, time.time(), retry=True)


async def test_cancelling_ends_everything_at_once_and_for_good(stores: Stores) -> None:
    await stores.submit(num_samples=3, callback_url="http://x")
    node = stores.node("a")
    ended, concluding = await node.must_take(), await node.must_take()
    await node.end(ended.attempt)
    await node.work.conclude(concluding.attempt, WELL, time.time())
    stood = await stores.tasks.cancel("t", time.time())
    assert [(state.index, state.status) for state in stood] == [(1, "concluding"), (2, "queued")]
    with pytest.raises(Superseded):
        await node.work.finish(concluding.attempt, time.time())
    assert await node.beat(concluding.attempt) == [concluding.attempt]
    states = await stores.tasks.load_rollouts("t")
    assert [state.status for state in states] == ["completed", "cancelled", "cancelled"]
    assert states[1].verdict is not None and states[1].verdict.failure is not None
    assert states[1].verdict.failure.failure is Failure.CANCELLED
    assert (await stores.tasks.load("t")).status == "cancelled"
    assert await stores.tasks.cancel("t", time.time()) == [] and await node.take() is None
    assert {state.index for _, state in await stores.tasks.claim_unclosed(10, time.time())} == {1, 2}
    assert await stores.tasks.claim_unclosed(10, time.time()) == []
    await stores.tasks.mark_closed("t", 1)


async def test_a_cancelled_task_that_nobody_began_leaves_nothing_to_close(stores: Stores) -> None:
    await stores.submit(num_samples=3)
    assert len(await stores.tasks.cancel("t", time.time())) == 3
    assert await stores.tasks.claim_unclosed(10, time.time()) == []
    assert await stores.tasks.count_waiting() == {}


async def test_a_task_that_is_cancelled_before_its_group_has_begun_leaves_no_member_to_close(stores: Stores) -> None:
    """A node has one rollout, which waits for a session while trainers are behind; that of one was taken away with its attempt. If the
    service opens a session just now, it is deleted."""
    await stores.submit(num_samples=4)
    node = stores.node("a")
    waiting, retried = (await node.must_take()).attempt, (await node.must_take()).attempt
    await node.work.advance(waiting, "ready", time.time(), {})
    await node.work.advance(retried, "running", time.time(), {"session_id": "t.1.1"})
    assert await node.work.give_up(retried, BROKEN, time.time(), retry=True)
    await stores.tasks.cancel("t", time.time())
    assert await stores.tasks.claim_unclosed(10, time.time()) == []
    assert set(await stores.tasks.claim_abandoned(10, time.time())) == {waiting, retried}


async def test_the_members_of_a_group_that_has_begun_are_all_closed_when_their_task_is_cancelled(stores: Stores) -> None:
    """It has begun with a rollout that runs, with one that failed before it had a session, or with one whose node was lost."""
    for task_id in ("runs", "fails", "lost"):
        await stores.submit(task_id, num_samples=2, on_lost_node="fail")
        node = stores.node("a")
        attempt = (await node.must_take()).attempt
        if task_id == "runs":
            await node.work.advance(attempt, "running", time.time(), {"session_id": attempt.session_id})
        elif task_id == "fails":
            await node.work.conclude(attempt, Verdict("failed", failure=BROKEN), time.time())
        else:
            await asyncio.sleep(2 * RAN_OUT)
            assert await stores.node("server").work.recover("server", RAN_OUT, time.time()) is None
        await stores.tasks.cancel(task_id, time.time())
        assert {state.index for _, state in await stores.tasks.claim_unclosed(10, time.time())} == {0, 1}, task_id


async def test_enough_usable_samples_stop_the_others(stores: Stores) -> None:
    """Five rollouts, two wanted: one still waits, one runs, one only has its session to close."""
    await stores.submit(num_samples=5, usable_samples=2)
    node = stores.node("a")
    taken = [await node.must_take() for _ in range(4)]
    await node.end(taken[0].attempt, Verdict("completed"))
    await node.end(taken[1].attempt, Verdict("timeout", reward=0.0))
    await node.work.conclude(taken[2].attempt, WELL, time.time())
    await node.end(taken[3].attempt)
    await node.work.finish(taken[2].attempt, time.time())
    states = await stores.tasks.load_rollouts("t")
    assert [state.status for state in states] == ["completed", "timeout", "completed", "completed", "cancelled"]
    assert states[4].verdict is not None and states[4].verdict.failure is not None
    assert states[4].verdict.failure.failure is Failure.EARLY_STOPPED
    assert (await stores.tasks.load("t")).status == "completed"
    assert [state.index for _, state in await stores.tasks.claim_unclosed(10, time.time())] == [4]


async def test_a_request_whose_answer_was_lost_takes_no_second_rollout(stores: Stores) -> None:
    """What the connection sends twice is answered as before."""
    await stores.submit(num_samples=2)
    room = '{"labels":{},"runtimes":["local"],"cpus":4,"memory_mb":4096}'
    args = ("a", room, 30000, repr(time.time()), "token")
    take = keys.read_script("take")
    first = await stores.connection.run(take, keys.DECLARED, args, durable=True)
    again = await stores.connection.run(take, keys.DECLARED, args, durable=True)
    assert first == again
    assert (await stores.node("a").must_take()).attempt.index == 1


async def test_a_step_that_is_told_twice_happened_once(stores: Stores) -> None:
    await stores.submit()
    node = stores.node("a")
    attempt = (await node.must_take()).attempt
    for _ in range(2):
        await node.work.advance(attempt, "ready", time.time(), {})
    for _ in range(2):
        await node.work.conclude(attempt, WELL, time.time())
    await node.work.conclude(attempt, Verdict("failed"), time.time())
    with pytest.raises(Superseded):
        await node.work.advance(attempt, "running", time.time(), {})
    for _ in range(2):
        await node.work.finish(attempt, time.time())
    assert (await stores.rollout()).verdict == WELL
    kinds = await stores.kinds()
    assert all(kinds.count(kind) == 1 for kind in kinds)


async def test_an_idle_node_is_woken_by_what_comes(stores: Stores) -> None:
    node = stores.node("a")
    await node.work.wait(0.0)
    waiting = asyncio.create_task(node.work.wait(300.0))
    await asyncio.sleep(0)
    await stores.submit()
    await asyncio.wait_for(waiting, 120)
    await node.must_take()


async def test_events_are_told_as_they_come_and_from_where_a_reader_stopped(stores: Stores) -> None:
    await stores.submit()
    told = stores.tasks.watch_events("t")
    first = await anext(told)
    assert (first.kind, dict(first.data)) == ("task.created", {"rollouts": 1})
    node = stores.node("a")
    attempt = (await node.must_take()).attempt
    assert (await anext(told)).data == {"index": 0, "status": "preparing", "attempt": 1, "node": "a"}
    await node.end(attempt)
    rest = [event async for event in told]
    assert [event.kind for event in rest] == ["rollout.concluding", "rollout.completed", "task.ended"]
    assert rest[1].data["reward"] == 1.0
    assert [event async for event in stores.tasks.watch_events("t", rest[0].id)] == rest[1:]
    assert [event async for event in stores.tasks.watch_events("t", rest[2].id)] == []


async def test_tasks_are_listed_newest_first_page_by_page(stores: Stores) -> None:
    for number in range(5):
        await stores.submit(f"t{number}")
    await stores.tasks.cancel("t3", time.time())
    page, cursor = await stores.tasks.list_tasks(status=None, limit=2, cursor=None)
    assert [state.task.task_id for state in page] == ["t4", "t3"]
    page, cursor = await stores.tasks.list_tasks(status="queued", limit=2, cursor=cursor)
    assert [state.task.task_id for state in page] == ["t2", "t1"]
    page, cursor = await stores.tasks.list_tasks(status="queued", limit=2, cursor=cursor)
    assert [state.task.task_id for state in page] == ["t0"] and cursor is None
    assert list((await stores.tasks.count_waiting()).values()) == [4]


async def test_a_page_of_tasks_of_a_rare_status_is_never_empty_before_the_end(
    stores: Stores, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("proxy.store.tasks.tasks.LOADED_AT_ONCE", 2)
    monkeypatch.setattr("proxy.store.tasks.tasks.LOOKED_AT", 4)
    for number in range(12):
        await stores.submit(f"t{number}")
    await stores.tasks.cancel("t1", time.time())
    (state,), cursor = await stores.tasks.list_tasks(status="cancelled", limit=5, cursor=None)
    assert state.task.task_id == "t1"
    assert await stores.tasks.list_tasks(status="cancelled", limit=5, cursor=cursor) == ([], None)


async def test_a_callback_is_one_servers_at_a_time_until_it_is_delivered(stores: Stores) -> None:
    await stores.submit(callback_url="http://x")
    await stores.tasks.cancel("t", 100.0)
    (state,) = await stores.tasks.claim_callbacks(10, 100.0)
    assert state.callback is not None and state.callback.tries == 0
    assert await stores.tasks.claim_callbacks(10, 101.0) == []
    await stores.tasks.record_callback("t", 102.0, error="500", next_try_at=110.0)
    assert await stores.tasks.claim_callbacks(10, 109.0) == []
    (state,) = await stores.tasks.claim_callbacks(10, 110.0)
    assert state.callback is not None
    assert (state.callback.tries, state.callback.last_error, state.callback.next_try_at) == (1, "500", 110.0)
    # The server dies with it; another is given it a minute later.
    (state,) = await stores.tasks.claim_callbacks(10, 171.0)
    await stores.tasks.record_callback("t", 172.0)
    assert await stores.tasks.claim_callbacks(10, 1e9) == []
    after = (await stores.tasks.load("t")).callback
    assert after is not None and (after.tries, after.delivered_at, after.last_error) == (2, 172.0, None)
    assert (await stores.kinds())[-2:] == ["callback.failed", "callback.delivered"]


async def test_ended_tasks_are_forgotten_once_nothing_is_left_to_do(stores: Stores) -> None:
    await stores.submit("open")
    await stores.submit("done", num_samples=2)
    node = stores.node("a")
    await node.must_take()
    begun = (await node.must_take()).attempt
    await node.work.advance(begun, "running", time.time(), {"session_id": begun.session_id})
    await stores.tasks.cancel("done", 100.0)
    assert await stores.tasks.forget(99.0, 10) == 0 and await stores.tasks.forget(100.0, 10) == 0
    for task, state in await stores.tasks.claim_unclosed(10, time.time()):
        await stores.tasks.mark_closed(task.task_id, state.index)
    assert await stores.tasks.forget(100.0, 10) == 1
    with pytest.raises(NotFound):
        await stores.tasks.load("done")
    page, _ = await stores.tasks.list_tasks(status=None, limit=10, cursor=None)
    assert [state.task.task_id for state in page] == ["open"]


async def test_a_queue_that_is_empty_leaves_nothing_behind(stores: Stores) -> None:
    await stores.submit(priority=7, labels={"only": "here"})
    node = stores.node("a", Room({"only": "here"}, ROOM.runtimes, 4.0, 4096))
    assert len(await stores.tasks.count_waiting()) == 1
    await node.end((await node.must_take()).attempt)
    assert await stores.tasks.count_waiting() == {}
    await stores.submit("again", priority=7, labels={"only": "here"})
    await node.end((await node.must_take()).attempt)


async def begun(node: Node) -> AttemptId:
    """A rollout that it takes and that opens its session."""
    attempt = (await node.must_take()).attempt
    await node.work.advance(attempt, "running", time.time(), {"session_id": attempt.session_id})
    return attempt


async def test_a_rollout_that_is_tried_again_goes_before_those_that_no_node_had(stores: Stores) -> None:
    """Its group would wait for it behind all others. Those who look see one queue."""
    await stores.submit("first", num_samples=2)
    await stores.submit("second")
    await stores.submit("urgent", priority=51)
    node = stores.node("a")
    assert (await node.must_take()).attempt.task_id == "urgent"
    await begun(node)
    retried = (await node.must_take()).attempt
    assert await node.work.give_up(retried, BROKEN, time.time(), retry=True)
    assert sorted((await stores.tasks.count_waiting()).values()) == [0, 2]
    assert [(await node.must_take()).attempt for _ in range(2)] == [AttemptId("first", 1, 2), AttemptId("second", 0, 1)]


async def test_a_rollout_that_is_held_back_gives_way_to_one_of_a_group_that_has_begun(stores: Stores) -> None:
    """Though it is more urgent, and was so when the other one's group began."""
    await stores.submit("filling", num_samples=2)
    node = stores.node("a")
    await node.beat()
    await begun(node)
    await stores.submit("urgent", num_samples=2, priority=90, max_attempts=1)
    held = (await node.must_take()).attempt
    assert await node.work.give_way(held, time.time())
    assert await node.work.give_way(held, time.time()), "it is told the same again"
    assert (await begun(node)).task_id == "filling"
    assert await node.take() is None, "no other group is to begin now"
    await stores.connection.execute("DEL", f"{keys.BASE}:hold", key=keys.BASE)
    again = (await node.must_take()).attempt
    assert (again, (await stores.rollout("urgent")).failures) == (AttemptId("urgent", 0, 2), ())
    assert not await node.work.give_up(again, BROKEN, time.time(), retry=True), "it has used up no attempt but this one"


async def test_what_others_give_way_to_is_taken_next_whatever_waits_before_it(stores: Stores) -> None:
    """Two that would be held back as well have been put back before it."""
    await stores.submit("filling", num_samples=2)
    for task_id in ("b", "c", "held"):
        await stores.submit(task_id)
    node = stores.node("a")
    await node.beat()
    await begun(node)
    failing, *others, held = [(await node.must_take()).attempt for _ in range(4)]
    for attempt in others:
        await node.work.put_back(attempt, time.time())
    assert await node.work.give_up(failing, BROKEN, time.time(), retry=True)
    assert await node.work.give_way(held, time.time())
    assert (await node.must_take()).attempt == AttemptId("filling", 1, 2)
    assert await node.take() is None


async def test_a_rollout_that_is_held_back_gives_way_to_none_that_would_not_go_on_in_its_place(stores: Stores) -> None:
    """One waits that would be held back as well, and one that this node cannot take."""
    wide = stores.node("wide", Room({}, ROOM.runtimes, 64.0, 1 << 20))
    await stores.submit("wide", num_samples=2, runtime=sized(8.0))
    await begun(wide)
    await stores.submit("held", num_samples=2)
    small = stores.node("small", Room({}, ROOM.runtimes, 4.0, 4096))
    await small.beat()
    held = (await small.must_take()).attempt
    assert not await small.work.give_way(held, time.time())
    assert (await stores.rollout("held")).status == "preparing"
    await stores.tasks.cancel("held", time.time())
    with pytest.raises(Superseded):
        await small.work.give_way(held, time.time())
