"""The bundled Redis by its pod's own shell line and configuration, its backups by the CronJob's script, and a restore by the documented
steps. The redis-server is real; only folders and addresses differ."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import redis

from proxy.store import keys
from tests.support.documents.helm_chart import CHART, Values, container, pod_of, the
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.redis_server import BINARY, free_port
from tests.support.service.running_service import TRAINER, RunningService
from tests.support.service.verbatim_process import wait_until

PASSWORD = "s3cret"
VALUES: Values = {"fullnameOverride": "verbatim", "redis": {"bundled": {"backup": {"enabled": True, "keep": 2}}}}
STEPS = re.findall(
    r"^```bash\n(.*?)^```$",
    (CHART.parents[1] / "docs" / "deploy.md").read_text().partition("\n### Backups\n")[2].partition("\n### ")[0],
    re.MULTILINE | re.DOTALL,
)
"""The blocks of docs/deploy.md: a backup now, and a restore."""


@dataclass
class Cluster:
    """Redis and one proxy of a release named verbatim, with volumes and programs below `folder`; used in a `with` block."""

    folder: Path
    engine: str
    port: int = field(default_factory=free_port)
    values: Values = field(default_factory=lambda: VALUES)
    _redis: subprocess.Popen[bytes] | None = None
    _proxy: RunningService | None = None

    def __enter__(self) -> Cluster:
        for name in ("data", "backups", "bin", "etc"):
            (self.folder / name).mkdir()
        # redis-cli lies beside the server; redis-check-rdb is the server under another name.
        for name, program in (
            ("redis-server", BINARY),
            ("redis-check-rdb", BINARY),
            ("redis-cli", Path(BINARY).with_name(Path(BINARY).name.replace("server", "cli"))),
        ):
            (self.folder / "bin" / name).symlink_to(program)
        config: str = the(self.values, "ConfigMap", "-redis")["data"]["redis.conf"]
        own = config.replace("/data", str(self.folder / "data")) + f"port {self.port}\nbind 127.0.0.1\n"
        (self.folder / "etc" / "redis.conf").write_text(own)
        for script, text in the(self.values, "ConfigMap", "-backup")["data"].items():
            (self.folder / "etc" / script).write_text(text)
        return self

    def __exit__(self, *_: object) -> None:
        self.scale("proxy", 0)
        self.kill_redis()

    def kill_redis(self) -> None:
        if self._redis is not None:
            self._redis.kill()
            self._redis.wait()
            self._redis = None

    @property
    def proxy(self) -> RunningService:
        assert self._proxy is not None
        return self._proxy

    def client(self, **given: Any) -> redis.Redis:
        return redis.Redis(port=self.port, protocol=2, decode_responses=True, **{"password": PASSWORD, **given})

    def scale(self, part: str, replicas: int) -> None:
        if part == "proxy" and replicas and self._proxy is None:
            self._proxy = RunningService(
                self.engine, f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0", engine_api="token"
            ).__enter__()
        elif part == "proxy" and not replicas and self._proxy is not None:
            self._proxy.__exit__()
            self._proxy = None
        elif part == "redis" and replicas and self._redis is None:
            line = container(pod_of(the(self.values, "StatefulSet", "-redis")) or {})["command"]
            self._redis = self._start(line, stdout=subprocess.DEVNULL)
            wait_until(self._answers, 60, "Redis answers")
        elif part == "redis" and not replicas and self._redis is not None:
            self._redis.terminate()
            self._redis.wait()
            self._redis = None

    def run_job(self, name: str) -> subprocess.CompletedProcess[str]:
        """Runs the container of a Job created from that CronJob."""
        one = container(pod_of(the(self.values, "CronJob", name)) or {})
        done = self._start(one["command"], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        output, _ = done.communicate(timeout=300)
        return subprocess.CompletedProcess(one["command"], done.returncode, output)

    def _start(self, command: list[str], **how: Any) -> subprocess.Popen[Any]:
        places = {
            "/etc/verbatim": f"{self.folder}/etc",
            "/etc/redis": f"{self.folder}/etc",
            "/backups": f"{self.folder}/backups",
            "/data": f"{self.folder}/data",
            "redis://verbatim-redis:6379": f"redis://127.0.0.1:{self.port}",
        }
        argv = [re.sub("|".join(places), lambda found: places[found[0]], word) for word in command]
        path = f"{self.folder}/bin:{os.environ['PATH']}"
        return subprocess.Popen(argv, env={"REDISCLI_AUTH": PASSWORD, "PATH": path}, **how)

    def _answers(self) -> bool:
        assert self._redis is not None and self._redis.poll() is None, "Redis did not start"
        with self.client() as client:
            try:
                return bool(client.ping())
            except redis.ConnectionError:
                return False


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with ScriptedEngine() as engine, Cluster(tmp_path, engine.url) as made:
        made.scale("redis", 1)
        yield made


def play(cluster: Cluster, block: str) -> None:
    """Performs the steps of a block. Waits are no-ops, because each step here completes before the next."""
    for line in block.splitlines():
        kubectl, _, _, *words = shlex.split(line, comments=True)
        assert kubectl == "kubectl"
        match words:
            case ["scale", target, replicas]:
                kind, name = target.split("/")
                the(cluster.values, {"deployment": "Deployment", "statefulset": "StatefulSet"}[kind], name)
                cluster.scale(name.removeprefix("verbatim-"), int(replicas.removeprefix("--replicas=")))
            case ["create", "job", _, source]:
                done = cluster.run_job(source.removeprefix("--from=cronjob/"))
                assert done.returncode == 0, done.stdout
            case ["wait", *_]:
                pass
            case _:
                raise AssertionError(line)


def lease(proxy: RunningService) -> dict[str, str]:
    """Leases every ready group separately; lease ids by group."""
    leased: dict[str, str] = {}
    while (answer := proxy.request("POST", "/batches/lease", TRAINER, json={"max_groups": 1})).status_code == 200:
        (group,) = answer.json()["groups"]
        leased[group["group_id"]] = answer.json()["lease_id"]
    assert answer.status_code == 204, answer.text
    return leased


def acknowledge(proxy: RunningService, lease_id: str) -> None:
    answer = proxy.request("POST", f"/batches/{lease_id}/ack", TRAINER)
    assert answer.status_code == 200, answer.text


def show(proxy: RunningService) -> dict[str, Any]:
    """Everything the control API shows of every session."""
    names = sorted(each["session_id"] for each in proxy.request("GET", "/sessions").json()["sessions"])
    paths = [
        path for name in names for path in (f"/sessions/{name}", f"/sessions/{name}/calls", f"/sessions/{name}/trajectories")
    ]
    return {path: proxy.request("GET", path).json() for path in paths}


def test_the_bundled_redis_starts_as_it_is_told_to_and_keeps_what_it_has(cluster: Cluster) -> None:
    with cluster.client() as client, cluster.client(password=None) as stranger:
        with pytest.raises(redis.AuthenticationError):
            stranger.get("kept")
        server = client.info("server")["process_id"]
        assert PASSWORD not in Path(f"/proc/{server}/cmdline").read_text()
        told = {name: client.config_get(name)[name] for name in ("appendonly", "appendfsync", "save", "maxmemory-policy")}
        assert told == {"appendonly": "yes", "appendfsync": "always", "save": "", "maxmemory-policy": "noeviction"}
        client.set("kept", "yes")
    cluster.kill_redis()
    cluster.scale("redis", 1)
    with cluster.client() as client:
        assert client.get("kept") == "yes"


def test_the_documented_steps_restore_a_lost_store_as_it_was_at_its_backup(cluster: Cluster) -> None:
    """At the backup one group is acknowledged, one leased, one ready, and one session is open. What came later is gone."""
    cluster.scale("proxy", 1)
    sessions = {name: cluster.proxy.session(session_id=name) for name in ("acked", "leased", "ready", "open")}
    leases: dict[str, str] = {}
    for name, session in sessions.items():
        session.ask(f"What is {name}?")
        if name != "open":
            session.close(reward=1.0)
        if name in ("acked", "leased"):
            leases |= lease(cluster.proxy)
    acknowledge(cluster.proxy, leases["acked"])
    with cluster.client() as client:
        # Delivery is marked in Redis a moment after the reply.
        wait_until(lambda: bool(client.smembers(keys.delivered("open"))), 60, "the mark of the delivered reply")
    expected = show(cluster.proxy)
    backup_now, restore = STEPS
    play(cluster, backup_now)

    acknowledge(cluster.proxy, lease(cluster.proxy)["ready"])
    sessions["open"].ask("And then?")
    cluster.proxy.session(session_id="late").ask("What is late?")
    cluster.kill_redis()
    shutil.rmtree(cluster.folder / "data")
    (cluster.folder / "data").mkdir()
    cluster.scale("redis", 1)
    assert show(cluster.proxy) == {}

    play(cluster, restore)
    assert show(cluster.proxy) == expected
    assert cluster.proxy.request("GET", "/sessions/late").status_code == 404
    # The lease is still held, the acknowledged group is not delivered again, and the ready one is delivered once.
    acknowledge(cluster.proxy, leases["leased"])
    again = lease(cluster.proxy)
    assert again.keys() == {"ready"}
    acknowledge(cluster.proxy, again["ready"])
    harness = sessions["open"].api_key
    body = {"model": "policy", "messages": [{"role": "user", "content": "And then?"}]}
    assert cluster.proxy.request("POST", "/v1/chat/completions", harness, json=body).status_code == 200
    # The next start reads the same: the backup has become Redis's own file.
    cluster.scale("proxy", 0)
    cluster.kill_redis()
    cluster.scale("redis", 1)
    cluster.scale("proxy", 1)
    assert show(cluster.proxy).keys() == expected.keys() and lease(cluster.proxy) == {}


def test_the_newest_backups_are_kept_and_a_failed_one_leaves_the_newest(cluster: Cluster) -> None:
    folder = cluster.folder / "backups"
    old = [f"verbatim-2020010{day}T000000Z.rdb" for day in (1, 2, 3)]
    for name in (*old, "verbatim-20200104T000000Z.rdb.part", "notes.txt"):
        (folder / name).write_text(name)
    done = cluster.run_job("verbatim-backup")
    assert done.returncode == 0, done.stdout
    kept = sorted(each.name for each in folder.iterdir())
    assert kept[:2] == ["notes.txt", old[2]] and len(kept) == 3
    cluster.scale("redis", 0)
    assert cluster.run_job("verbatim-backup").returncode != 0
    left = sorted(each.name for each in folder.iterdir())
    assert left == ["notes.txt", kept[-1]]


def test_a_restore_is_refused_while_redis_runs_or_if_the_backup_is_incomplete(cluster: Cluster) -> None:
    with cluster.client() as client:
        client.set("kept", "yes")
    done = cluster.run_job("verbatim-backup")
    (backup,) = (cluster.folder / "backups").iterdir()
    assert done.stdout.endswith(f"/backups/{backup.name}\n")
    done = cluster.run_job("verbatim-restore")
    assert done.returncode == 1 and "Redis still runs" in done.stdout
    cluster.scale("redis", 0)
    own = {each: each.stat().st_mtime_ns for each in (cluster.folder / "data").rglob("*")}
    whole = backup.read_bytes()
    backup.write_bytes(whole[:-5])
    assert cluster.run_job("verbatim-restore").returncode != 0
    backup.unlink()
    done = cluster.run_job("verbatim-restore")
    assert done.returncode == 1 and "there is no backup" in done.stdout
    assert {each: each.stat().st_mtime_ns for each in (cluster.folder / "data").rglob("*")} == own
    # A name takes precedence over the newest.
    named = "verbatim-20260102T030405Z.rdb"
    (cluster.folder / "backups" / named).write_bytes(whole)
    (cluster.folder / "backups" / "verbatim-20260202T030405Z.rdb").write_bytes(b"")
    cluster.values = {"fullnameOverride": "verbatim", "redis": {"bundled": {"backup": {"enabled": True, "restore": named}}}}
    done = cluster.run_job("verbatim-restore")
    assert done.returncode == 0, done.stdout
    assert [each.name for each in (cluster.folder / "data").glob("before-*/*")]
