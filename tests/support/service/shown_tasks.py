"""A task to look at, whose six rollouts came to six different ends, as a node would have left them."""

from __future__ import annotations

import asyncio
from typing import Any

from contract.attempts import Failure, FailureRecord, Verdict
from proxy.store.connection import StoreConnection
from proxy.store.tasks.work import WorkStore
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.runtimes.rollout_stores import ROOM
from tests.support.service.rollout_service import submit
from tests.support.service.running_service import RunningService
from tests.support.service.ui_sessions import PROBE

TASK = "roman-7"
PASSED = "4 passed"
WRONG = "3 passed, 1 failed\nAssertionError: IIII != IV\n  in test_four\n  at line 12\nand much more of it: " + PROBE
VERDICTS = (
    Verdict("completed", 1.0, feedback=PASSED),
    Verdict("completed", 0.0, feedback=WRONG),
    Verdict(
        "timeout",
        0.25,
        failure=FailureRecord(Failure.AGENT_TIMEOUT, "the agent's budget of 60 s ran out", "n1:/logs/agent.err"),
    ),
    Verdict("failed", failure=FailureRecord(Failure.HARNESS_CRASHED, "pi was ended by signal 9", "n1:/logs/agent.err")),
)


def shown_task(service: RunningService, engine: ScriptedEngine) -> None:
    """Rollouts 0 to 3 have the VERDICTS, 4 is running and 5 waits. Each waited 10 s for a node and 2 s for a slot, was prepared in 12 s,
    ran for 60 s and was evaluated in 6."""
    body: dict[str, Any] = {
        "instruction": "Mend roman.py.\n" + PROBE,
        "metadata": {"label": "code"},
        "evaluator": {"kind": "pytest"},
    }
    submitted = submit(service, task_id=TASK, num_samples=6, **body)
    asyncio.run(_play(service, engine, submitted["created_at"]))


async def _play(service: RunningService, engine: ScriptedEngine, began: float) -> None:
    assert service.settings.redis
    connection = StoreConnection(service.settings.redis)
    work = WorkStore(connection)
    for number in range(5):
        taken = await work.take("n1", ROOM, 3600.0, began + 10)
        assert taken is not None
        attempt, verdict = taken.attempt, VERDICTS[number] if number < len(VERDICTS) else None
        session = await asyncio.to_thread(
            service.session,
            session_id=attempt.session_id,
            group_id=TASK,
            group_size=6,
            task_id=TASK,
            metadata={"label": "code", "rollout": number, "harness": "pi"},
        )
        engine.say(engine.family.speak(f"It is {'IV' if number == 0 else 'IIII'}."))
        await asyncio.to_thread(session.ask, [{"role": "user", "content": "Mend roman.py."}])
        await work.advance(attempt, "ready", began + 22, {})
        await work.advance(attempt, "running", began + 24, {"session_id": session.session_id, "logs": f"n1:/logs/{number}"})
        if verdict is None:
            continue
        await work.advance(attempt, "evaluating", began + 84, {"calls": 1, "exit_code": 0 if verdict.failure is None else None})
        await work.conclude(attempt, verdict, began + 90)
        ending = {} if verdict.reward is None else {"reward": verdict.reward}
        await asyncio.to_thread(session.close, verdict.status, **ending)
        await work.finish(attempt, began + 91)
    await connection.close()
