"""What is released: built, installed and run outside of this folder, alone; and the files that say what it is made of."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from email.parser import Parser
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests import ROOT
from tests.support.engine.scripted_engine import ScriptedEngine
from tests.support.service.running_service import ADMIN, TRAINER
from tests.support.service.verbatim_process import wait_until

PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PACKAGES = ("contract", "proxy", "reconstruct", "rollout", "trainer_client", "cli")
CLIENT = ("trainer_client", "contract", "reconstruct")
RELEASED = ("proxy", "rollout", "archive", "otel")


def run(*command: str | Path, cwd: Path) -> str:
    """Its output. Nothing of this folder is on its path, nor of the caller's."""
    asked = [str(part) for part in command]
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(asked, cwd=cwd, env=environment, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build(folder: Path, target: str, into: Path) -> Path:
    run(sys.executable, "-m", "hatchling", "build", "--target", target, "--directory", into, cwd=folder)
    (built,) = into.glob("*.whl" if target == "wheel" else "*.tar.gz")
    return built


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT, "sdist", tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from the unpacked sdist: what it lacks the wheel lacks."""
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    return build(next(folder.iterdir()), "wheel", tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def client_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(ROOT / "wheels/client", "wheel", tmp_path_factory.mktemp("client"))


@pytest.fixture(scope="module")
def python(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of an environment that holds the wheel."""
    return environment_with(wheel, tmp_path_factory.mktemp("installed") / "env")


def files_in(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if ".dist-info/" not in name}


def metadata_of(wheel: Path) -> Any:
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def files_here(packages: tuple[str, ...]) -> dict[str, bytes]:
    found = (path for package in packages for path in (ROOT / package).rglob("*"))
    kept = (path for path in found if path.is_file() and "__pycache__" not in path.parts)
    return {path.relative_to(ROOT).as_posix(): path.read_bytes() for path in kept}


def environment_with(wheel: Path, folder: Path) -> Path:
    """The Python of a fresh environment that holds the wheel and, behind it, the libraries of this one."""
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin/python"
    run(sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel, cwd=folder)
    (packages,) = folder.glob("lib/python*/site-packages")
    # A path by itself: an editable install of this folder does not come with it.
    (packages / "libraries.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return python


def test_the_wheel_holds_every_file_of_its_packages_and_nothing_else(wheel: Path) -> None:
    """Made from the sdist, which so is whole."""
    assert files_in(wheel) == files_here(PACKAGES)
    assert metadata_of(wheel)["Version"] == PROJECT["version"]


def test_both_wheels_tell_type_checkers_that_they_are_typed(wheel: Path, client_wheel: Path) -> None:
    for built, packages in ((wheel, PACKAGES), (client_wheel, CLIENT)):
        assert {f"{package}/py.typed" for package in packages} <= files_in(built).keys()
        assert "Typing :: Typed" in metadata_of(built).get_all("Classifier")


def test_nothing_says_to_install_the_project_by_its_name() -> None:
    """It is on no package index, where anyone could claim the name."""
    said = re.compile(r"install [^\n]*?verbatim-rl\b(?!-client)")
    folders = [ROOT / name for name in (*PACKAGES, "docs", "deploy", "examples", "benchmarks", "wheels", "helm")]
    files = [*ROOT.glob("*.*"), *(file for folder in folders for file in folder.rglob("*.*"))]
    kinds = {".py", ".md", ".toml", ".yaml", ".txt", ".Dockerfile"}
    named = [file.name for file in files if file.suffix in kinds and said.search(file.read_text())]
    assert [name for name in named if name != "CHANGELOG.md"] == []


def test_the_wheel_runs_outside_of_this_folder(python: Path, tmp_path: Path) -> None:
    assert "serve" in run(python.parent / "verbatim", "--help", cwd=tmp_path)
    assert run(python.parent / "verbatim", "--version", cwd=tmp_path) == f"verbatim {PROJECT['version']}\n"
    program = "import importlib.util, sys; print(*[importlib.util.find_spec(name).origin for name in sys.argv[1:]], sep='\\n')"
    places = run(python, "-c", program, *PACKAGES, cwd=tmp_path).split()
    assert len(places) == len(PACKAGES) and all(Path(place).is_relative_to(python.parents[1]) for place in places)


def test_the_clients_wheel_is_the_same_sources_under_the_same_version(client_wheel: Path) -> None:
    """And no other name at the top, so that nothing of a trainer's can clash with it."""
    assert files_in(client_wheel) == files_here(CLIENT)
    metadata = metadata_of(client_wheel)
    assert (metadata["Name"], metadata["Version"]) == ("verbatim-rl-client", PROJECT["version"])
    asked = {str(Requirement(text)) for text in metadata.get_all("Requires-Dist") if "extra" not in text}
    assert asked <= {str(Requirement(text)) for text in PROJECT["dependencies"]}


@cache
def owners() -> Mapping[str, list[str]]:
    """The distributions that each importable top-level name belongs to."""
    return metadata.packages_distributions()


def required(name: str, extras: Iterable[str]) -> Iterator[Requirement]:
    try:
        texts = metadata.requires(name) or ()
    except metadata.PackageNotFoundError:
        return  # Of another Python or system.
    for requirement in map(Requirement, texts):
        if requirement.marker is None or any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def kept_from(asked: Iterable[str]) -> set[str]:
    """Importable top-level names that belong to nothing `asked` requires, directly or indirectly."""
    needed: set[tuple[str, str]] = set()
    left = [Requirement(text) for text in asked]
    while left:
        requirement = left.pop()
        wanted = {(canonicalize_name(requirement.name), extra) for extra in ("", *requirement.extras)}
        if not wanted <= needed:
            needed |= wanted
            left += required(requirement.name, requirement.extras)
    names = {name for name, _ in needed}
    return {top for top, of in owners().items() if not names & {canonicalize_name(each) for each in of}} - {*PACKAGES}


def program_alone(asked: Iterable[str], then: str) -> str:
    """`then`, where nothing can be imported but the standard library, the wheel, and what `asked` asks for, down to the last."""
    return f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {kept_from(asked)!r}:
            raise ModuleNotFoundError(f"{{name}} is not asked for", name=name)

sys.meta_path.insert(0, Absent())
{then}
"""


def asked_by(wheel: Path, *extras: str) -> list[str]:
    """What its metadata asks for with those extras."""
    requirements = map(Requirement, metadata_of(wheel).get_all("Requires-Dist"))
    markers = [{"extra": extra} for extra in ("", *extras)]
    return [str(each) for each in requirements if each.marker is None or any(map(each.marker.evaluate, markers))]


def test_the_client_works_with_nothing_but_what_its_wheel_asks_for(client_wheel: Path, tmp_path: Path) -> None:
    python = environment_with(client_wheel, tmp_path / "env")
    program = """
import reconstruct.trajectory, trainer_client, trainer_client.publish, trainer_client.advantages
with trainer_client.TrainerClient("http://127.0.0.1:1", "token"):
    print(trainer_client.__file__)
"""
    told = run(python, "-c", program_alone(asked_by(client_wheel), program), cwd=tmp_path)
    assert Path(told.strip()).is_relative_to(tmp_path)


@contextmanager
def at_work(python: Path, asked: Iterable[str], folder: Path, *args: str) -> Iterator[Callable[[], str]]:
    """`verbatim` outside of this folder, with nothing but what `asked` asks for; gives what it has said. It ends well when it is
    told to."""
    command: list[str | Path] = [python, "-c", program_alone(asked, "from cli.main import main; main()"), *args]
    tokens = {"VERBATIM_ADMIN_TOKEN": ADMIN, "VERBATIM_TRAINER_TOKEN": TRAINER}
    environment = {"PATH": "/usr/bin:/bin", "VERBATIM_LOCAL_SANDBOX": "none", **tokens}
    log = folder / f"{args[0]}.log"
    with log.open("w") as written:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=written, stderr=written)
    try:

        def said() -> str:
            assert process.poll() is None, log.read_text()
            return log.read_text()

        yield said
        process.terminate()
        assert process.wait(120) == 0, log.read_text()
    finally:
        process.kill()
        process.wait()


def asked_of(url: str, method: str, path: str, token: str = ADMIN, **more: Any) -> httpx.Response:
    answer = httpx.request(method, url + path, headers={"Authorization": f"Bearer {token}"}, timeout=60, **more)
    assert answer.is_success, answer.text
    return answer


def test_service_and_node_work_with_nothing_but_what_their_extras_ask_for(wheel: Path, python: Path, tmp_path: Path) -> None:
    """A call is recorded and its row exported, the pages have their files, and the service hears of the node."""
    data = str(tmp_path / "data")
    with (
        ScriptedEngine() as engine,
        at_work(
            python, asked_by(wheel, "proxy"), tmp_path, "serve", "--engine", engine.url, "--port=0", "--data-dir", data
        ) as said,
    ):
        wait_until(lambda: "application/json" in said(), 120, "it serves")
        (url,) = re.findall(r"^base URL: (\S+)$", said(), re.MULTILINE)
        wait_until(lambda: httpx.get(f"{url}/readyz", timeout=60).is_success, 60, "an engine")
        session = asked_of(url, "POST", "/sessions", json={"session_id": "s"}).json()
        body = {"model": "policy", "messages": [{"role": "user", "content": "hello"}]}
        asked_of(url, "POST", "/s/s/v1/chat/completions", session["api_key"], json=body)
        asked_of(url, "POST", "/sessions/s/close", json={"status": "completed", "reward": 1.0})
        (row,) = asked_of(url, "GET", "/sessions/s/trajectories").json()["trajectories"]
        assert 0 < sum(row["loss_mask"]) < len(row["token_ids"])
        page = asked_of(url, "GET", "/ui/sessions/s").text
        static = set(re.findall(r'"(/ui/static/[^"]+)"', page))
        assert len(static) > 1 and all(asked_of(url, "GET", path).text for path in static)
        node = ("node", f"--url={url}", f"--data-dir={tmp_path}/node", "--runtime=local")
        with at_work(python, asked_by(wheel, "rollout"), tmp_path, *node) as told:
            wait_until(lambda: (told(), asked_of(url, "GET", "/nodes").json()["nodes"])[1] != [], 120, "a node")


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "pins.txt").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == sorted(lines)
    return dict(line.split("==") for line in lines)


def test_pins_hold_every_dependency_of_what_is_released() -> None:
    """`make pins` after a change of dependencies; each pin within the bounds of pyproject.toml."""
    pinned = pins()
    wanted = [*PROJECT["dependencies"], *(text for extra in RELEASED for text in PROJECT["optional-dependencies"][extra])]
    for requirement in map(Requirement, wanted):
        version = pinned.get(canonicalize_name(requirement.name))
        assert version is not None and requirement.specifier.contains(version, prereleases=True), f"{requirement}: {version}"


def test_what_a_pinned_dependency_asks_for_is_pinned_too() -> None:
    """As far as it is installed here in the version that is pinned. Down to the last: an image takes nothing that is not named."""
    pinned = pins()
    for name, version in pinned.items():
        try:
            found = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue
        for requirement in map(Requirement, found.requires or () if found.version == version else ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                other = pinned.get(canonicalize_name(requirement.name))
                assert other is not None and requirement.specifier.contains(other, prereleases=True), f"{name}: {requirement}"


VERSIONED = re.compile(
    r'(?:verbatim-(?:proxy|node|vllm|trainer):|^ *(?:tag|version|appVersion): "?)([0-9][\w.]*)', re.MULTILINE
)


def test_one_version_is_said_everywhere() -> None:
    """Where a file cannot read it from pyproject.toml it says the same: the chart, tags of images, and commands that make these."""
    files = [*(ROOT / "deploy").rglob("*.*"), *(ROOT / "docs").glob("*.md"), ROOT / "helm/verbatim/Chart.yaml"]
    said = [(path.name, found[1]) for path in files for found in VERSIONED.finditer(path.read_text())]
    assert {name for name, _ in said} >= {"Chart.yaml", "compose.yaml", "compose.gpu.yaml", "deploy.md", "vllm.Dockerfile"}
    assert [each for each in said if each[1] != PROJECT["version"]] == []


def test_ci_is_the_one_script_and_hooks_are_its_style_checks() -> None:
    (job,) = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    (local,) = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    hooks = {hook["entry"].partition(" ")[0] for hook in local["hooks"]}
    checks = re.search(r"^check:.*\n((?:\t.*\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert checks is not None
    assert hooks == {line.split()[0].replace("$(BIN)", ".cache/venv/bin") for line in checks[1].splitlines()}
