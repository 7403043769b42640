"""A job of Harbor's, unchanged, with the plug-in: Harbor and mini-swe-agent are real, the model is scripted."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.harnesses.installed import folder_of
from tests.joins.conftest import Framework
from tests.support.engine.scripted_engine import Generation, Say, ScriptedEngine
from tests.support.service.redis_server import RedisServer
from tests.support.service.running_service import TRAINER, RunningService, wait_until
from trainer_client.integrations.atif import read_rows

LOCAL = "trainer_client.integrations.harbor_local:LocalEnvironment"
TASK_TOML = """version = "1.0"
[verifier]
timeout_sec = 300
[agent]
timeout_sec = 300
[environment]
cpus = 1
memory_mb = 1024
storage_mb = 1024
"""
AGENTS = ("Installed", "BreaksDownOnce", "RunsOutOfTime", "LosesItsSession", "CallsNothing")
WORK = "echo hello > /app/out.txt"
ASK = """
import asyncio, json, sys
from harbor.llms.lite_llm import LiteLLM

llm = LiteLLM(model_name="openai/policy", api_base=sys.argv[1], collect_rollout_details=True)
said = asyncio.run(llm.call("Say hello."))
print(json.dumps({"prompt_ids": said.prompt_token_ids, "completion_ids": said.completion_token_ids, "logprobs": said.logprobs}))
"""
TWO_AGENTS = """
import asyncio
from types import SimpleNamespace
from trainer_client.integrations.harbor import NoSession, VerbatimPlugin

plugin = VerbatimPlugin()
plugin._agents = [SimpleNamespace(context_id="t", model_name="m") for _ in range(2)]
try:
    asyncio.run(plugin._open_session(SimpleNamespace(trial_id="t")))
except NoSession as error:
    print(error)
"""
VERIFY = """#!/bin/bash
[ "$(cat /app/out.txt)" = hello ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
"""


@dataclass
class Harbor:
    """Harbor's command in one folder. `jobs` has what it wrote."""

    framework: Framework

    @property
    def folder(self) -> Path:
        return self.framework.folder

    @property
    def jobs(self) -> Path:
        return self.folder / "jobs"

    def run(self, program: str, *words: str | Path, **variables: str) -> subprocess.CompletedProcess[str]:
        own = {
            "PATH": f"{folder_of('mini').resolve()}:{os.environ['PATH']}",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "BROKE_DOWN": str(self.folder / "broke-down"),
        }
        return self.framework.run(program, *words, **{**own, **variables})

    def job(
        self,
        name: str,
        *agents: str,
        tasks: str = "tasks",
        attempts: int = 2,
        retries: int = 1,
        retry_seconds: float = 120.0,
        agent: Mapping[str, str] | None = None,
        plug_in: bool = True,
        **variables: str,
    ) -> list[dict[str, Any]]:
        """The results of its trials."""
        job = {
            "job_name": name,
            "jobs_dir": str(self.jobs),
            "n_attempts": attempts,
            "n_concurrent_trials": 2,
            "skip_credential_checks": True,
            "retry": {"max_retries": retries},
            "environment": {"import_path": LOCAL, "kwargs": {"show": self._programs()}},
            "agents": [{"name": f"harbor_agents:{name}", "model_name": "openai/policy", **(agent or {})} for name in agents],
            "datasets": [{"path": str(self.folder / tasks)}],
        }
        (self.folder / "job.json").write_text(json.dumps(job))
        with_it = ("--plugin", "verbatim", "--plugin-kwarg", f"retry_seconds={retry_seconds}") if plug_in else ()
        self.run("harbor", "run", "-c", "job.json", *with_it, "-y", **variables)
        return self.results(name)

    def results(self, name: str) -> list[dict[str, Any]]:
        return [json.loads(path.read_text()) for path in sorted((self.jobs / name).glob("*/result.json"))]

    def _programs(self) -> str:
        """What a sandbox has to be shown: the agent, and the Python that it was installed with."""
        agent = folder_of("mini").resolve().parent
        own = Path(
            subprocess.check_output([agent / "bin/python", "-c", "import sys; print(sys.base_prefix)"], text=True).strip()
        )
        return ":".join(str(path) for path in (agent, own) if path.parts[1] != "usr")


@contextmanager
def harbor_at(folder: Path, client: Path, url: str) -> Iterator[Harbor]:
    write_task(folder / "tasks/hello")
    yield Harbor(Framework("harbor", folder, client, url))


def write_task(task: Path, *steps: str) -> None:
    for part in ("tests", "environment", *(f"steps/{step}" for step in steps)):
        (task / part).mkdir(parents=True)
    instructed = [task / "steps" / step for step in steps] or [task]
    for folder in instructed:
        (folder / "instruction.md").write_text("Write hello into /app/out.txt.\n")
    (task / "task.toml").write_text(TASK_TOML + "".join(f'[[steps]]\nname = "{step}"\n' for step in steps))
    (task / "environment/Dockerfile").write_text("FROM scratch\n")
    (task / "tests/test.sh").write_text(VERIFY)


@dataclass
class Job:
    harbor: Harbor
    service: RunningService
    results: list[dict[str, Any]]

    def of(self, agent: str) -> list[dict[str, Any]]:
        return [each for each in self.results if each["config"]["agent"]["name"] == f"harbor_agents:{agent}"]

    def sessions(self, agent: str) -> list[dict[str, Any]]:
        listed = self.service.request("GET", "/sessions?limit=1000").json()["sessions"]
        return [each for each in listed if each["metadata"]["agent"] == f"harbor_agents:{agent}"]


def play(engine: ScriptedEngine) -> None:
    def reply(generation: Generation, index: int) -> Say:
        command = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT" if WORK in generation.prompt else WORK
        return Say(engine.family.speak("Next.", calls=[("bash", {"command": command})]))

    engine.script = reply


@contextmanager
def serving(redis_server: RedisServer, client: Path, folder: Path, **settings: Any) -> Iterator[tuple[RunningService, Harbor]]:
    with (
        ScriptedEngine("qwen3", max_model_len=32_768) as engine,
        RunningService(engine.url, redis_server.url, **settings) as service,
        harbor_at(folder, client, service.url) as harbor,
    ):
        play(engine)
        yield service, harbor


@pytest.fixture(scope="module")
def job(redis_server: RedisServer, client_wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job with every agent: two attempts each, at one task."""
    with serving(redis_server, client_wheel, tmp_path_factory.mktemp("harbor")) as (service, harbor):
        yield Job(harbor, service, harbor.job("all", *AGENTS))


def test_the_plug_in_is_found_by_its_name_and_brings_no_service(job: Job) -> None:
    assert "verbatim" in job.harbor.run("harbor", "plugins", "list").stdout
    assert {path.name for path in job.harbor.framework.client.iterdir() if "dist-info" not in path.name} == {
        "contract",
        "reconstruct",
        "trainer_client",
    }


def test_attempts_are_a_group_with_the_verifiers_reward_and_their_rows_are_the_trials_details(job: Job) -> None:
    sessions = {each["metadata"]["harbor_trial"]: each for each in job.sessions("Installed")}
    assert [(each["status"], each["reward"], each["calls"]) for each in sessions.values()] == [("completed", 1.0, 2)] * 2
    assert len({each["group_id"] for each in sessions.values()}) == 1
    for result in job.of("Installed"):
        session_id = sessions[result["trial_name"]]["session_id"]
        answer = job.service.request("GET", f"/sessions/{session_id}/trajectories").json()
        (row,) = answer["trajectories"]
        (detail,) = result["agent_result"]["rollout_details"]
        sampled = [token for turn in detail["completion_token_ids"] for token in turn]
        assert sampled == [token for token, mask in zip(row["token_ids"], row["loss_mask"], strict=True) if mask]
        told = [logprob for turn in detail["logprobs"] for logprob in turn]
        assert told == [number for number, mask in zip(row["logprobs"], row["loss_mask"], strict=True) if mask]
        assert row["token_ids"][: len(detail["prompt_token_ids"][1])] == detail["prompt_token_ids"][1]
        accounting = answer["accounting"]
        assert accounting["sampled_tokens"] == accounting["exported_tokens"] == len(sampled)
        # What Harbor makes of the agent's own files is there as ever.
        assert result["agent_result"]["n_output_tokens"] == len(sampled)
        logs = job.harbor.jobs / "all" / result["trial_name"] / "agent"
        assert (logs / "trajectory.json").exists()
        document = json.loads((logs / "verbatim.trajectory.json").read_text())
        (read,) = read_rows(document)
        assert read.token_ids.tolist() == row["token_ids"][: len(read.token_ids)]
        assert (int(read.loss_mask.sum()), read.reward) == (len(sampled), 1.0)


def test_a_retry_replaces_the_attempt_that_broke_down(job: Job) -> None:
    sessions = job.sessions("BreaksDownOnce")
    assert sorted(each["status"] for each in sessions) == ["completed", "completed", "failed"]
    assert len({each["group_id"] for each in sessions}) == 1
    (failed,) = [each for each in sessions if each["status"] == "failed"]
    assert failed["error"] == "RuntimeError: the agent broke down"


def test_what_an_agent_did_before_its_time_was_up_is_graded_and_trained(job: Job) -> None:
    assert [(each["status"], each["reward"]) for each in job.sessions("RunsOutOfTime")] == [("timeout", 1.0)] * 2
    assert all(result["agent_result"]["rollout_details"] for result in job.of("RunsOutOfTime"))


def test_a_session_that_is_gone_is_no_end_of_the_job(job: Job) -> None:
    """What a hook raises would end it."""
    results = job.of("LosesItsSession")
    assert [result["verifier_result"]["rewards"] for result in results] == [{"reward": 1.0}] * 2
    assert job.sessions("LosesItsSession") == []


def test_an_agent_that_never_called_the_model_has_failed_whatever_its_reward(job: Job) -> None:
    assert [result["verifier_result"]["rewards"] for result in job.of("CallsNothing")] == [{"reward": 1.0}] * 2
    sessions = job.sessions("CallsNothing")
    assert [(each["status"], each["reward"]) for each in sessions] == [("failed", None)] * 2
    assert all(each["error"].startswith("no_calls: ") for each in sessions)


def test_a_trainer_gets_the_groups_and_no_session_is_left_open(job: Job) -> None:
    listed = job.service.request("GET", "/sessions?limit=1000").json()["sessions"]
    assert [each for each in listed if each["status"] == "open"] == []
    leased = job.service.request("POST", "/batches/lease", TRAINER, json={"max_groups": 9}).json()
    assert len(leased["groups"]) == 3
    assert [len(group["trajectories"]) for group in leased["groups"]] == [2, 2, 2]


def test_the_operators_own_key_is_in_nothing_that_a_trial_leaves(job: Job) -> None:
    """Agents print what they are given: their sessions' keys are there, and open nothing any more."""
    text = "".join(path.read_text(errors="replace") for path in job.harbor.jobs.rglob("*") if path.is_file())
    assert "sk-the-operators-own" not in text and "vb-" in text


def test_a_job_is_resumed_into_the_same_groups(job: Job) -> None:
    """A trial's configuration is stored, and compared when its job goes on: the plug-in must leave it as it is."""
    before = {each["session_id"] for each in job.sessions("Installed")}
    (first, *_) = job.of("Installed")
    shutil.rmtree(job.harbor.jobs / "all" / first["trial_name"])
    job.harbor.run("harbor", "jobs", "resume", "-p", job.harbor.jobs / "all", "--plugin", "verbatim")
    assert len(job.harbor.results("all")) == len(job.results)
    (added,) = [each for each in job.sessions("Installed") if each["session_id"] not in before]
    assert (added["status"], added["reward"]) == ("completed", 1.0)
    assert added["group_id"] == job.sessions("Installed")[-1]["group_id"]


def test_the_steps_of_a_trial_are_one_session_with_its_reward_and_each_has_its_own_details(
    redis_server: RedisServer, client_wheel: Path, tmp_path: Path
) -> None:
    """An agent whose time ran out in a step was graded by that step's verifier: its trial has no error."""
    with serving(redis_server, client_wheel, tmp_path) as (service, harbor):
        write_task(tmp_path / "several/steps", "first", "second")
        results = harbor.job("steps", "Installed", "RunsOutOfTime", tasks="several", attempts=1, retries=0)
        listed = service.request("GET", "/sessions?limit=1000").json()["sessions"]
        sessions = {each["metadata"]["harbor_trial"]: each for each in listed if each["task_id"] == "steps"}
        assert len(results) == len(sessions) == 2
        for result in results:
            assert_steps(result, sessions[result["trial_name"]], service)


def assert_steps(result: dict[str, Any], session: dict[str, Any], service: RunningService) -> None:
    timed_out = "RunsOutOfTime" in result["config"]["agent"]["name"]
    assert (session["status"], session["reward"], session["calls"]) == ("timeout" if timed_out else "completed", 1.0, 4)
    details = [detail for step in result["step_results"] for detail in step["agent_result"]["rollout_details"]]
    assert [len(detail["completion_token_ids"]) for detail in details] == [2, 2]
    sampled = sum(len(turn) for detail in details for turn in detail["completion_token_ids"])
    accounting = service.request("GET", f"/sessions/{session['session_id']}/trajectories").json()["accounting"]
    assert sampled == accounting["sampled_tokens"] == accounting["exported_tokens"]


def test_untouched_trials_are_recorded_with_a_projects_key_and_harbors_own_client_gets_the_ids(
    redis_server: RedisServer, client_wheel: Path, tmp_path: Path
) -> None:
    """mini-swe-agent names its trial in its calls by itself. The client is that of Harbor's terminus-2."""
    with serving(redis_server, client_wheel, tmp_path) as (service, harbor):
        made = service.request("POST", "/projects", json={"name": "untouched"}).json()
        agent = {"base_url": f"{service.url}/v1", "model_api_key_name": "PROJECT_KEY"}
        results = harbor.job("untouched", "Installed", agent=agent, plug_in=False, PROJECT_KEY=made["key"])
        listed = service.request("GET", "/sessions?limit=1000").json()["sessions"]
        sessions = [each for each in listed if each["project"] == "untouched"]
        assert [each["calls"] for each in sessions] == [2, 2] and len(results) == 2

        session = service.session()
        asked = harbor.run("python", "-c", ASK, session.base_url, OPENAI_API_KEY=session.api_key)
        (call,) = session.calls
        recorded = {name: call[name] for name in ("prompt_ids", "completion_ids", "logprobs")}
        assert json.loads(asked.stdout.splitlines()[-1]) == recorded


def is_held_back(service: RunningService) -> bool:
    return "verbatim_backpressure_total 0.0" not in service.request("GET", "/metrics").text


def test_a_trial_waits_while_the_service_holds_its_group_back(
    redis_server: RedisServer, client_wheel: Path, tmp_path: Path
) -> None:
    """Before its agent, so that nothing of the agent's time has passed."""
    redis_server.flushall()
    held = {"undelivered_groups": 1, "hold_seconds": 0.0}
    with serving(redis_server, client_wheel, tmp_path, admission=held) as (service, harbor), ThreadPoolExecutor(1) as pool:
        leased: list[str] = []

        def lease() -> bool:
            answer = service.request("POST", "/batches/lease", TRAINER, json={})
            groups = answer.json()["groups"] if answer.content else []
            leased.extend(row["session_id"] for group in groups for row in group["trajectories"])
            return bool(leased) or running.done()

        running = pool.submit(harbor.job, "held", "Installed", "RunsOutOfTime", attempts=1, retries=0)
        wait_until(lambda: is_held_back(service) or running.done(), 300, "a trial is held back")
        wait_until(lease, 300, "the other trial's group is there")
        results = running.result()
        lease()
    assert len(set(leased)) == len(results) == 2
    assert [result["verifier_result"]["rewards"] for result in results] == [{"reward": 1.0}] * 2


def test_without_a_session_no_agent_runs(client_wheel: Path, tmp_path: Path) -> None:
    """It would take the operator's own key to its vendor. The job ends well: its trials failed, each alone. A simulated user is an agent,
    too, and would share the other one's session."""
    with harbor_at(tmp_path, client_wheel, "http://127.0.0.1:1") as harbor:
        assert "the trial has 2 agents" in harbor.run("python", "-c", TWO_AGENTS).stdout
        results = harbor.job("away", "Installed", attempts=1, retries=0, retry_seconds=0.1)
        (result,) = results
        assert result["exception_info"]["exception_type"] == "NoAnswer"
        assert result["agent_result"] is None
        assert not (harbor.jobs / "away" / result["trial_name"] / "agent/mini-swe-agent.txt").exists()
