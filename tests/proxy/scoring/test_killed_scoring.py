"""A service that is killed while sessions close and are scored: another one goes on, and every row is leased once, with its scores."""

from __future__ import annotations

import json
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.verbatim_process import TRAINER, Serving, wait_until

SESSIONS = 50
SCORERS = {"teacher": {"policy": "teacher"}}


def test_sessions_that_close_while_a_service_is_killed_are_each_scored_and_leased_once(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    redis_server.flushall()
    with ScriptedEngine() as student, ScriptedEngine() as teacher:
        engines = [student.url, f"teacher={teacher.url}"]
        flags = [flag for engine in engines for flag in ("--engine", engine)]
        with (
            Serving(*flags, "--redis", redis_server.url, data_dir=tmp_path, VERBATIM_SCORERS=json.dumps(SCORERS)) as killed,
            RunningService(engines, redis_server.url, scorers=SCORERS) as other,
        ):
            sessions = [killed.session(session_id=f"s{number}", scores=["teacher"]) for number in range(SESSIONS)]
            for session in sessions:
                session.ask("a question")

            def close(session_id: str) -> bool:
                """Whether the service lived to answer."""
                try:
                    path = f"/sessions/{session_id}/close"
                    return killed.request("POST", path, json={"status": "completed", "reward": 1.0}).status_code == 200
                except (httpx.HTTPError, OSError):
                    return False

            with ThreadPoolExecutor(4) as threads:
                closing = [threads.submit(close, session.session_id) for session in sessions]
                wait_until(lambda: sum(each.done() for each in closing) >= SESSIONS // 4, 120, "a quarter is closed")
                killed.send(signal.SIGKILL)
            wait_until(lambda: killed.ended, 60, "it is dead")
            answered = [each.result() for each in closing]
            assert not all(answered)
            for session in sessions:
                # As whoever got no answer does.
                answer = other.request(
                    "POST", f"/sessions/{session.session_id}/close", json={"status": "completed", "reward": 1.0}
                )
                assert answer.status_code == 200, answer.text
            leased: Counter[str] = Counter()
            while sum(leased.values()) < SESSIONS:
                answer = other.request("POST", "/batches/lease", TRAINER, json={"max_groups": 8, "wait_seconds": 60})
                assert answer.status_code == 200, answer.text
                for group in answer.json()["groups"]:
                    for row in group["trajectories"]:
                        leased[row["session_id"]] += 1
                        known = [each is not None for each in row["scores"]["teacher"]["logprobs"]]
                        assert known == [bool(each) for each in row["loss_mask"]]
                other.request("POST", f"/batches/{answer.json()['lease_id']}/ack", TRAINER)
            assert leased == Counter(session.session_id for session in sessions)
            nothing = other.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1})
            assert nothing.status_code == 204
