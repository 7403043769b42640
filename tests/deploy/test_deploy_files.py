"""What is in deploy/, as far as it can be seen without a container engine: images, the compose file, units of systemd."""

from __future__ import annotations

import configparser
import importlib.util
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from packaging.requirements import Requirement
from typer.main import get_command

from cli.main import app
from cli.serving import workers
from cli.serving.server import CUT_SECONDS
from examples.vllm_server import vllm_command
from proxy.store import embedded
from rollout.node import STOP_SECONDS
from tests import ROOT
from tests.support.documents.helm_chart import CHART
from tests.support.documents.prometheus_rules import RULES, promtool
from tests.support.documents.settings_in_code import variables
from tests.support.engine.forked_vllm import run_beside_vllm
from tests.support.machine import require

DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted(DEPLOY.glob("*.Dockerfile"))
UNITS = {"verbatim.service": "serve", "verbatim-node.service": "node"}
SECONDS = {"s": 1, "m": 60, "h": 3600}
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]


def instructions(file: Path) -> list[tuple[str, str]]:
    """The Dockerfile's instructions in order, each with its arguments on one line."""
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in lines if line.strip()]


def stages(file: Path) -> list[list[tuple[str, str]]]:
    found: list[list[tuple[str, str]]] = []
    for name, rest in instructions(file):
        found = [*found, []] if name == "FROM" else found
        if found:
            found[-1].append((name, rest))
    return found


def compose() -> dict[str, Any]:
    read: dict[str, Any] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    return read


def own_services() -> dict[str, dict[str, Any]]:
    return {name: each for name, each in compose()["services"].items() if "build" in each}


def seconds(text: str) -> int:
    return sum(int(number) * SECONDS[unit] for number, unit in re.findall(r"(\d+)([smh])", text))


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_images_are_pinned_and_run_as_nobody_in_particular(file: Path) -> None:
    for stage in stages(file):
        base = stage[0][1].split()[0]
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", base), base
        ends = [rest for name, rest in stage if name == "USER"]
        is_left_behind = stage[0][1].endswith(" AS build")
        assert ends == ([] if is_left_behind else ["10001:10001"])
        if not is_left_behind:
            assert [name for name, _ in stage if name == "ENTRYPOINT"]
        assert not [rest for name, rest in stage if name == "ADD"]


@pytest.mark.parametrize("name", ["proxy", "node"])
def test_images_run_on_the_python_that_is_built_with_profile_guided_optimization(name: str) -> None:
    """It takes 4 to 10 % off a call. The official images are configured with --enable-optimizations and --with-lto
    (docker-library/python, 3.11/slim-bookworm/Dockerfile); pyenv's and others' builds often are not. The environment is made by the same
    Python that runs it."""
    made, run = ({rest.split()[0] for key, rest in stage if key == "FROM"} for stage in stages(DEPLOY / f"{name}.Dockerfile"))
    assert made == run and all(re.fullmatch(r"python:[\d.]+-slim-\w+", base) for base in run)
    installed = [rest for key, rest in instructions(DEPLOY / f"{name}.Dockerfile") if key == "RUN" and "apt-get" in rest]
    assert not any("python" in packages for packages in installed)


@pytest.mark.parametrize("file", DOCKERFILES, ids=lambda file: file.stem)
def test_what_an_image_copies_is_there_and_not_ignored(file: Path) -> None:
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    let_in = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    named = {stage[0][1].rpartition(" AS ")[2] for stage in stages(file)}
    for name, rest in instructions(file):
        if name != "COPY":
            continue
        if rest.startswith("--from="):
            assert rest.split()[0].removeprefix("--from=") in named
            continue
        *sources, _ = rest.split()
        for source in sources:
            assert (ROOT / source).exists(), source
            assert {source, source.split("/")[0]} & let_in, source


def test_an_image_of_the_project_copies_every_package_that_its_wheel_has() -> None:
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    for file in DOCKERFILES:
        copied = {source for name, rest in instructions(file) if name == "COPY" for source in rest.split()[:-1]}
        if file.stem != "vllm":
            assert {*packages, "pyproject.toml", "README.md", "LICENSE"} <= copied


@pytest.mark.parametrize("name", ["proxy", "node"])
def test_images_install_what_is_pinned(name: str) -> None:
    """The extras exist, and all that they ask for is among the versions that are released."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (extras,) = [
        rest.removeprefix("EXTRAS=").split(",") for key, rest in instructions(DEPLOY / f"{name}.Dockerfile") if key == "ARG"
    ]
    pins = dict(line.split("==") for line in (ROOT / "pins.txt").read_text().splitlines() if line and line[0] != "#")
    asked = [*project["dependencies"], *(each for extra in extras for each in project["optional-dependencies"][extra])]
    for requirement in map(Requirement, asked):
        assert requirement.specifier.contains(pins[requirement.name]), requirement
    (command,) = [rest for key, rest in instructions(DEPLOY / f"{name}.Dockerfile") if key == "RUN" and "EXTRAS" in rest]
    assert "--constraint pins.txt" in command


def test_the_backend_lies_in_the_engines_image_where_its_flag_looks_for_it() -> None:
    argv, env = vllm_command("model", 8000, device="cpu")
    module = argv[argv.index("--worker-extension-cls") + 1].rpartition(".")[0].replace(".", "/") + ".py"
    for stage in stages(DEPLOY / "vllm.Dockerfile"):
        told = dict(re.findall(r"(\w+)=(\S*)", " ".join(rest for name, rest in stage if name == "ENV")))
        folder = module.rpartition("/")[0]
        assert ("COPY", f"{folder} {told['PYTHONPATH']}/{folder}") in stage
        assert env.keys() - told.keys() <= {"TORCHDYNAMO_DISABLE", "VLLM_CPU_KVCACHE_SPACE"}
        if stage[0][1].endswith(" AS cpu"):
            assert env.keys() <= told.keys()
    version = re.search(r"vllm-cpu==(\S+)", (ROOT / "constraints.txt").read_text())
    assert version and f"FROM vllm/vllm-openai:v{version[1]} " in (DEPLOY / "vllm.Dockerfile").read_text()


def test_the_plugin_works_from_what_lies_in_the_engines_image(tmp_path: Path) -> None:
    """vLLM finds its entry point, and it needs nothing else of this project."""
    (stage, _) = stages(DEPLOY / "vllm.Dockerfile")
    root = dict(re.findall(r"(\w+)=(\S*)", " ".join(rest for name, rest in stage if name == "ENV")))["PYTHONPATH"]
    for source, target in (rest.split() for name, rest in stage if name == "COPY" and root in rest):
        shutil.copytree(ROOT / source, tmp_path / Path(target).relative_to(root))
    program = """
import importlib.metadata as metadata, sys
sys.path[:] = [sys.argv[1], *(path for path in sys.path if path != sys.argv[2])]
(entry,) = {each for each in metadata.entry_points(group="vllm.endpoint_plugins") if each.dist.name == "verbatim-plugin"}
assert entry.name == "verbatim" and entry.load().name == "verbatim"
import proxy.engine.in_vllm.sampler, proxy
assert list(proxy.__path__) == [sys.argv[1] + "/proxy"], proxy.__path__
"""
    run_beside_vllm("-c", program, str(tmp_path), str(ROOT))


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_the_compose_files_are_ones(name: str) -> None:
    package = importlib.util.find_spec("check_jsonschema")
    assert package and package.origin
    schema = Path(package.origin).parent / "builtin_schemas" / "vendor" / "compose-spec.json"
    jsonschema.validate(yaml.safe_load((DEPLOY / name).read_text()), json.loads(schema.read_text()))


def test_everything_in_the_compose_file_starts_when_what_it_needs_is_healthy() -> None:
    services = compose()["services"]
    assert services.keys() == {"redis", "vllm", "proxy", "node", "trainer", "prometheus", "grafana"}
    for name, each in services.items():
        assert name == "trainer" or each["healthcheck"]["test"]
        for other, how in each.get("depends_on", {}).items():
            assert services[other]["healthcheck"]
            assert how["condition"] == "service_healthy" or (name, other) == ("prometheus", "proxy")
    assert services["proxy"]["depends_on"].keys() == {"redis", "vllm"}
    assert "proxy" in services["node"]["depends_on"] and "proxy" in services["trainer"]["depends_on"]


def test_the_compose_file_keeps_to_the_rules() -> None:
    whole = compose()
    for name, each in whole["services"].items():
        assert each["cap_drop"] == ["ALL"] and "no-new-privileges:true" in each["security_opt"] and each["read_only"], name
        assert re.fullmatch(r"[\w./-]+:v?\d+\.\d+\.\d+[\w.-]*", each["image"]) and each["mem_limit"]
        assert "build" not in each or re.split("[:-]", each["image"])[2] == VERSION
        for variable, value in each.get("environment", {}).items():
            assert not re.search("TOKEN|PASSWORD|KEY", variable) or value.startswith("${")
        for volume in each.get("volumes", ()):
            assert volume.partition(":")[0] in whole["volumes"]
        for used in each.get("configs", ()):
            assert (DEPLOY / whole["configs"][used["source"]]["file"]).is_file()
    networks = {name: set(each["networks"]) for name, each in whole["services"].items()}
    assert {name for name, each in networks.items() if "engines" in each} == {"vllm", "proxy"}
    assert {name for name, each in networks.items() if "store" in each} == {"redis", "proxy"}
    assert [name for name, each in whole["services"].items() if "ports" in each] == ["proxy", "grafana"]


def test_what_the_services_are_told_is_what_they_understand() -> None:
    main: Any = get_command(app)
    for name in ("proxy", "node", "trainer"):
        told = own_services()[name]["environment"].keys() - {"HF_TOKEN"}
        assert told - variables() == set()
    command, *flags = own_services()["node"]["command"]
    assert {flag.partition("=")[0] for flag in flags} <= {opt for each in main.commands[command].params for opt in each.opts}
    asked = set(re.findall(r"\$\{(\w+)", (DEPLOY / "compose.yaml").read_text()))
    assert set(re.findall(r"^(\w+)=", (DEPLOY / ".env.example").read_text(), re.MULTILINE)) == asked


@pytest.mark.parametrize(("name", "device"), [("compose.yaml", "cpu"), ("compose.gpu.yaml", "gpu")])
def test_compose_starts_the_engine_as_verbatim_starts_its_own(name: str, device: Any) -> None:
    service = yaml.safe_load((DEPLOY / name).read_text())["services"]["vllm"]
    argv, _ = vllm_command("model", 8000, device=device)
    flags = {flag.partition("=")[0] for flag in service["command"]}
    assert {each for each in argv if each.startswith("--")} == flags
    (transfer,) = [flag.partition("=")[2] for flag in service["command"] if flag.startswith("--weight-transfer-config")]
    assert json.loads(transfer) == {"backend": "verbatim"}
    assert service["build"]["target"] == device


def test_containers_have_the_time_to_end() -> None:
    services = compose()["services"]
    drain = int(services["proxy"]["environment"]["VERBATIM_DRAIN_SECONDS"])
    assert seconds(services["proxy"]["stop_grace_period"]) >= drain + CUT_SECONDS
    (node_drain,) = [int(flag.partition("=")[2]) for flag in services["node"]["command"] if flag.startswith("--drain")]
    assert seconds(services["node"]["stop_grace_period"]) >= node_drain + 2 * STOP_SECONDS


def test_rollouts_reach_the_side_of_harnesses_alone_and_redis_asks_for_a_password() -> None:
    """A rollout with `network: proxy` had the control API at the one port it reaches; who got into the network of Redis had everything."""
    services = compose()["services"]
    control = services["proxy"]["environment"]["VERBATIM_CONTROL_PORT"]
    node = services["node"]["environment"]
    assert node["VERBATIM_URL"] == services["trainer"]["environment"]["VERBATIM_URL"] == f"http://proxy:{control}"
    assert node["VERBATIM_HARNESS_URL"] == "http://proxy:8700" and control != "8700"
    assert {each.rpartition(":")[2] for each in services["proxy"]["ports"]} == {"8700", control}
    redis, password = services["redis"], "${REDIS_PASSWORD:?set it in deploy/.env}"
    assert redis["command"][redis["command"].index("--requirepass") + 1] == redis["environment"]["REDISCLI_AUTH"] == password
    assert services["proxy"]["environment"]["VERBATIM_REDIS"] == f"redis://:{password}@redis:6379/0"
    assert [name for name, each in services.items() if "REDIS" in json.dumps(each)] == ["redis", "proxy"]


def test_redis_refuses_records_before_its_container_is_killed_for_its_memory() -> None:
    """Killed, it would load its file and be killed again. Something is left for a rewrite of the file."""
    redis = compose()["services"]["redis"]
    size = redis["command"][redis["command"].index("--maxmemory") + 1]
    assert re.fullmatch(r"\d+gb", size) and int(size[:-2]) < int(redis["mem_limit"].removesuffix("g"))


def test_prometheus_and_grafana_find_what_they_are_to_show() -> None:
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["metrics_path"] == "/metrics" and job["static_configs"] == [{"targets": ["proxy:8701"]}]
    targets = {
        each["source"]: each["target"] for service in compose()["services"].values() for each in service.get("configs", ())
    }
    assert scraped["rule_files"] == [targets["alerts"]]
    (provider,) = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"]
    assert str(Path(targets["dashboard"]).parent) == provider["options"]["path"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    files = {name: (DEPLOY / each["file"]).resolve() for name, each in compose()["configs"].items()}
    assert files["alerts"] == CHART / "files" / "alerts.yaml" and files["dashboard"] == CHART / "files" / "dashboard.json"


def test_prometheus_takes_its_configuration_and_its_rules(tmp_path: Path) -> None:
    text = (DEPLOY / "prometheus" / "prometheus.yml").read_text()
    (tmp_path / "prometheus.yml").write_text(text.replace("/etc/prometheus/alerts.yaml", str(RULES)))
    done = promtool("check", "config", str(tmp_path / "prometheus.yml"))
    assert done.returncode == 0 and "rules found" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(("unit", "command"), UNITS.items())
def test_the_units_are_ones_and_their_processes_have_the_time_to_end(unit: str, command: str, tmp_path: Path) -> None:
    text = (DEPLOY / "systemd" / unit).read_text()
    # Sections may name a key twice, which configparser takes for an error.
    parsed = configparser.RawConfigParser(strict=False)
    parsed.optionxform = str  # type: ignore[assignment, method-assign]
    parsed.read_string(text)
    service = parsed["Service"]
    binary, subcommand, *flags = service["ExecStart"].split()
    assert (binary, subcommand) == ("/opt/verbatim/bin/verbatim", command)
    told = dict(each.split("=") for each in re.findall(r"^Environment=(\S+)", text, re.MULTILINE))
    assert told.keys() <= variables()
    drain = int(told["VERBATIM_DRAIN_SECONDS"]) if command == "serve" else int(flags[flags.index("--drain-seconds") + 1])
    # Several workers of a service have longer than one process has for what is cut; then its own Redis ends.
    after = max(CUT_SECONDS, workers.STOP_SECONDS) + embedded.STOP_SECONDS if command == "serve" else 2 * STOP_SECONDS
    assert int(service["TimeoutStopSec"]) > drain + after
    copy = tmp_path / unit
    copy.write_text(text.replace(binary, "/bin/true"))
    done = subprocess.run([require("systemd-analyze"), "verify", str(copy)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
