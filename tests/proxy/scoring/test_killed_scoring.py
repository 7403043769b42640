"""A service that is killed while sessions close and are scored: another one goes on, and every row is leased once, with its scores.

Every second session is judged first, and scored with the hints that come of it.
"""

from __future__ import annotations

import json
import signal
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.proxy.scoring.test_judges import LINE
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import RunningService
from tests.support.service.scripted_service import ScriptedService, json_answer
from tests.support.service.verbatim_process import TRAINER, Serving, wait_until

SESSIONS = 50
SCORERS: dict[str, Any] = {"teacher": {"policy": "teacher"}, "hindsight": {"policy": "teacher", "prompt": "hindsight"}}


def test_sessions_that_close_while_service_and_scorer_die_are_each_scored_and_leased_once(
    redis_server: RedisServer, tmp_path: Path, scripted_server: ScriptedService
) -> None:
    redis_server.flushall()
    scripted_server.script(LINE, json_answer({"score": 0.5, "hint": "look first"}))
    scorers = SCORERS | {"prm": {"url": f"{scripted_server.url}/turn"}}
    with ScriptedEngine() as student, ScriptedEngine() as teacher:
        engines = [student.url, f"teacher={teacher.url}"]
        flags = [flag for engine in engines for flag in ("--engine", engine)]
        with (
            Serving(*flags, "--redis", redis_server.url, data_dir=tmp_path, VERBATIM_SCORERS=json.dumps(scorers)) as killed,
            RunningService(engines, redis_server.url, scorers=scorers) as other,
        ):
            asked = (["teacher"], ["hindsight", "prm"])
            sessions = [killed.session(session_id=f"s{number}", scores=asked[number % 2]) for number in range(SESSIONS)]
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
                teacher.stop()
            wait_until(lambda: killed.ended, 60, "it is dead")
            answered = [each.result() for each in closing]
            assert not all(answered)
            for session in sessions:
                # As whoever got no answer does.
                answer = other.request(
                    "POST", f"/sessions/{session.session_id}/close", json={"status": "completed", "reward": 1.0}
                )
                assert answer.status_code == 200, answer.text
            teacher.start(teacher.port)
            leased: Counter[str] = Counter()
            while sum(leased.values()) < SESSIONS:
                answer = other.request("POST", "/batches/lease", TRAINER, json={"max_groups": 8, "wait_seconds": 60})
                assert answer.status_code == 200, answer.text
                for group in answer.json()["groups"]:
                    for row in group["trajectories"]:
                        leased[row["session_id"]] += 1
                        ((name, score),) = row["scores"].items()
                        assert name == asked[int(row["session_id"][1:]) % 2][0]
                        known = [each is not None for each in score["logprobs"]]
                        assert known == [bool(each) for each in row["loss_mask"]]
                other.request("POST", f"/batches/{answer.json()['lease_id']}/ack", TRAINER)
            assert leased == Counter(session.session_id for session in sessions)
            nothing = other.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1})
            assert nothing.status_code == 204
