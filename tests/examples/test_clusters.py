"""The two examples for eight machines, run to their end over programs that tell what Slurm's, Kubernetes' and ours would have got."""

from __future__ import annotations

import inspect
import json
import os
import re
import stat
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import helm_python
import kubernetes_validate
import pytest
import yaml
from typer.main import get_command

from cli.main import app
from examples.trainers import torch_loop
from examples.vllm_server import vllm_command
from tests import ROOT
from tests.support.documents.helm_chart import CHART

CLUSTERS = ROOT / "examples" / "clusters"
MACHINES = ["gpu1", "gpu2", "gpu3"]
TELL = """
import json, os, sys
from pathlib import Path
told = Path(os.environ["TOLD"])

def tell(stdin=""):
    line = json.dumps({"argv": [Path(sys.argv[0]).name, *sys.argv[1:]], "stdin": stdin, "machine": os.environ.get("SLURMD_NODENAME", ""),
                       "slot": os.environ.get("SLURM_LOCALID", "")})
    with told.open("a") as file:
        file.write(line + "\\n")
"""
SRUN = """
import subprocess
flags = dict(each.removeprefix("--").partition("=")[::2] for each in sys.argv[1:] if each.startswith("--"))
start = next(place for place, each in enumerate(sys.argv[1:], 1) if not each.startswith("--"))
tell()
machines = [each for each in os.environ["MACHINES"].split() if each in flags.get("nodelist", os.environ["MACHINES"]).split()]
machines = [each for each in machines if each != flags.get("exclude")]
each = int(flags.get("ntasks-per-node", 1))
assert (int(flags["nodes"]), int(flags["ntasks"])) == (len(machines), len(machines) * each), (sys.argv, machines)
if flags["ntasks"] == "1":
    os.execvp(sys.argv[start], sys.argv[start:])
for machine in machines:
    for slot in range(each):
        where = {"SLURMD_NODENAME": machine, "SLURM_LOCALID": str(slot)}
        subprocess.run(sys.argv[start:], env={**os.environ, **where}, check=True)
"""
SERVES = """
tell()
if sys.argv[1] == "serve":
    os.execvp("sleep", ["sleep", "600"])
"""
TRAINS = """
import time
tell()
while "torch_loop" in sys.argv[2] and told.read_text().count('["verbatim", "node"') < len(os.environ["MACHINES"].split()):
    time.sleep(0.02)
while "torch_loop" in sys.argv[2] and told.read_text().count("openai.api_server\\", \\"--model") < int(os.environ["ENGINES"]):
    time.sleep(0.02)
"""
PROGRAMS = {
    "srun": SRUN,
    "scontrol": 'print("\\n".join(os.environ["MACHINES"].split()))',
    "verbatim": SERVES,
    "python": TRAINS,
    "curl": "",
    "helm": "tell(sys.stdin.read() if '-f' in sys.argv else '')",
    "kubectl": "tell(sys.stdin.read() if sys.argv[-1] == '-' else '')\nsys.exit('get' in sys.argv and 'jsonpath' not in sys.argv[-1])",
}


def run(script: str, folder: Path, **variables: str) -> list[dict[str, Any]]:
    """What each program was told, in the order in which they began."""
    programs = folder / "bin"
    programs.mkdir()
    for name, text in PROGRAMS.items():
        (programs / name).write_text(f"#!{sys.executable} -IS\n{TELL}{text}\n")
        (programs / name).chmod(0o755)
    env = {"PATH": f"{programs}:/usr/bin:/bin", "TOLD": str(folder / "told"), "MACHINES": " ".join(MACHINES), **variables}
    done = subprocess.run(["bash", str(CLUSTERS / script)], cwd=folder, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def flags_of(argv: list[str]) -> dict[str, str]:
    """By name, the last value of each."""
    return {name: value for name, value in zip(argv, [*argv[1:], ""], strict=True) if name.startswith("--")}


def check_verbatim(argv: list[str]) -> None:
    """The command and its flags exist."""
    command: Any = get_command(app)
    _, *words = argv
    while hasattr(command, "commands"):
        command, words = command.commands[words[0]], words[1:]
    assert flags_of(words).keys() <= {opt for parameter in command.params for opt in parameter.opts}, argv


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("slurm")
    engines = str(8 * (len(MACHINES) - 1))
    told = run(
        "slurm.sbatch", folder, SLURM_JOB_NODELIST="gpu[1-3]", SLURM_JOB_ID="7", ENGINES=engines, VERBATIM_ENV=str(folder)
    )
    return folder, told


def test_under_slurm_the_service_is_told_of_every_engine_that_is_started(slurm: tuple[Path, list[dict[str, Any]]]) -> None:
    _, told = slurm
    started = [each for each in told if "vllm.entrypoints.openai.api_server" in each["argv"]]
    at = [f"http://{each['machine']}:{flags_of(each['argv'])['--port']}" for each in started]
    (serve,) = [each["argv"] for each in told if each["argv"][:2] == ["verbatim", "serve"]]
    assert [value for name, value in pairwise(serve) if name == "--engine"] == sorted(at)
    assert len(set(at)) == 16 and not any(MACHINES[0] in url for url in at)


def test_under_slurm_an_engine_is_started_as_verbatim_starts_its_own(slurm: tuple[Path, list[dict[str, Any]]]) -> None:
    _, told = slurm
    engine = next(each["argv"] for each in told if "vllm.entrypoints.openai.api_server" in each["argv"])
    argv, env = vllm_command("Qwen/Qwen3-1.7B", 8000, host="0.0.0.0", max_model_len=32768, device="gpu")
    assert flags_of(engine) | {"--port": ""} == flags_of(argv) | {"--port": ""}
    text = (CLUSTERS / "slurm.sbatch").read_text()
    assert all(f"{name}={value}" in text for name, value in env.items() if name != "PYTHONPATH")


def test_under_slurm_every_command_and_flag_exists_and_tokens_are_in_none(slurm: tuple[Path, list[dict[str, Any]]]) -> None:
    folder, told = slurm
    ours = [each["argv"] for each in told if each["argv"][0] == "verbatim"]
    for argv in ours:
        check_verbatim(argv)
    assert {argv[1] for argv in ours} == {"serve", "node", "tasks"}
    nodes = [each for each in told if each["argv"][:2] == ["verbatim", "node"]]
    assert [each["machine"] for each in nodes] == [flags_of(each["argv"])["--name"] for each in nodes] == MACHINES
    (trainer,) = [
        each["argv"] for each in told if "examples.trainers.torch_loop" in each["argv"] and each["argv"][0] == "python"
    ]
    named = {f"--{name.replace('_', '-')}" for name in inspect.signature(torch_loop.train).parameters}
    assert flags_of(trainer).keys() == {"--model", "--weights", "--steps"} <= named
    tokens = sorted((folder / "run-7").glob("*-token"))
    assert [path.name for path in tokens] == ["admin-token", "node-token", "trainer-token"]
    for path in tokens:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_text().strip() not in json.dumps(told)


def test_under_slurm_the_numbers_of_the_head_are_those_of_the_job() -> None:
    text = (CLUSTERS / "slurm.sbatch").read_text()
    asked = dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)$", text, re.MULTILINE))
    nodes, gpus = int(asked["nodes"]), int(asked["gpus-per-node"])
    (each,) = re.findall(r"ROLLOUTS_EACH=(\d+)", text)
    assert f"{nodes - 1} machines x {gpus} GPUs, one GPU each: {(nodes - 1) * gpus}" in text
    assert f"{nodes} machines x {each} at once: {nodes * int(each)}" in text


@pytest.fixture(scope="module")
def kubernetes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return run("kubernetes.sh", tmp_path_factory.mktemp("kubernetes"), REGISTRY="registry.example.com/rl")


def test_under_kubernetes_the_chart_renders_with_the_examples_values(kubernetes: list[dict[str, Any]]) -> None:
    (install,) = [each for each in kubernetes if each["argv"][:2] == ["helm", "upgrade"]]
    values = yaml.safe_load(install["stdin"])
    with helm_python.Chart.load(CHART) as chart:
        texts = chart.render(values, name="verbatim", namespace="rl")
    made = [each for path, text in texts.items() if path.endswith(".yaml") for each in yaml.safe_load_all(text) if each]
    names = {(each["kind"], each["metadata"]["name"]) for each in made}
    applied = [
        each for call in kubernetes if call["argv"][0] == "kubectl" for each in yaml.safe_load_all(call["stdin"]) if each
    ]
    claim, job = applied
    for each in applied:
        kubernetes_validate.validate(each, "1.31", strict=True)
    pod = job["spec"]["template"]["spec"]
    claims = {each["persistentVolumeClaim"]["claimName"] for each in pod["volumes"]}
    assert claims == {claim["metadata"]["name"], "verbatim-weights"} and ("PersistentVolumeClaim", "verbatim-weights") in names
    (trainer,) = pod["containers"]
    told = {each["name"]: each for each in trainer["env"]}
    assert told["VERBATIM_URL"]["value"] == "http://verbatim-proxy:8701" and ("Service", "verbatim-proxy") in names
    assert flags_of(trainer["args"]).keys() == {"--model", "--weights", "--steps"}
    waited = {each["argv"][5] for each in kubernetes if each["argv"][3:5] == ["rollout", "status"]}
    assert waited == {"statefulset/verbatim-vllm"} and ("StatefulSet", "verbatim-vllm") in names
    for call in (each["argv"] for each in kubernetes if each["argv"][0] == "verbatim"):
        check_verbatim(call)


def test_under_kubernetes_the_secrets_are_those_that_the_chart_reads(kubernetes: list[dict[str, Any]]) -> None:
    made = {
        each["argv"][6]: {word.partition("=")[2].partition("=")[0] for word in each["argv"] if "--from-literal" in word}
        for each in kubernetes
        if each["argv"][3:6] == ["create", "secret", "generic"]
    }
    assert made == {
        "verbatim-tokens": {"admin-tokens", "trainer-tokens", "node-tokens", "node-token"},
        "verbatim-redis": {"password"},
    }


def test_under_kubernetes_the_numbers_of_the_head_are_those_of_the_values(kubernetes: list[dict[str, Any]]) -> None:
    (install,) = [each for each in kubernetes if each["argv"][:2] == ["helm", "upgrade"]]
    values, text = yaml.safe_load(install["stdin"]), (CLUSTERS / "kubernetes.sh").read_text()
    engines, nodes, slots = values["vllm"]["replicas"], values["nodes"]["replicas"], values["nodes"]["slots"]["run"]
    assert f"7 machines x 8 GPUs, one GPU each: {engines}" in text and engines == 7 * 8
    assert (
        f"{nodes} nodes x {slots} at once: {nodes * slots}" in text and int(values["runtimes"]["quota"]["pods"]) > nodes * slots
    )
    assert values["nodes"]["capacity"] == {"cpus": slots, "memoryMb": slots * 2048}


@pytest.mark.parametrize("path", sorted(CLUSTERS.iterdir()), ids=lambda path: path.name)
def test_the_shell_reads_it(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert not os.access(path, os.X_OK), "it is started as its first lines say"
