"""What a release is held to: `python wheels/release.py tag v0.1.0`, `python wheels/release.py check dist`. Standard library alone."""

from __future__ import annotations

import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def read_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"])


def check_tag(tag: str) -> str:
    """The version. Raises SystemExit unless the tag is of this version and the changelog has a section for it."""
    version = read_version()
    if tag != f"v{version}":
        raise SystemExit(f"the tag is {tag}, but pyproject.toml has version {version}: tag v{version}, or change the version")
    if f"\n## [{version}]" not in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"):
        raise SystemExit(f"CHANGELOG.md has no section [{version}]: rename [Unreleased]")
    return version


def check_dist(folder: Path) -> list[str]:
    """The names of the files. Raises SystemExit unless they are the two wheels and the sdist of this version, each with the licence."""
    version = read_version()
    wheels = [f"{name}-{version}-py3-none-any.whl" for name in ("verbatim_rl", "verbatim_rl_client")]
    sdist = f"verbatim_rl-{version}.tar.gz"
    found = sorted(path.name for path in folder.iterdir() if path.name != ".gitignore")
    if found != sorted([*wheels, sdist]):
        raise SystemExit(
            f"{folder} has {', '.join(found)}; a release is {', '.join([*wheels, sdist])}: empty it and run make dist"
        )
    for name in wheels:
        with zipfile.ZipFile(folder / name) as wheel:
            _require(name, wheel.namelist(), "/licenses/LICENSE", "trainer_client/py.typed")
    with tarfile.open(folder / sdist) as archive:
        _require(sdist, archive.getnames(), "/LICENSE", "/CHANGELOG.md")
    return found


def _require(name: str, members: list[str], *endings: str) -> None:
    for ending in endings:
        if not any(member.endswith(ending) for member in members):
            raise SystemExit(f"{name} has no {ending.lstrip('/')}")


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["tag", tag]:
            sys.stdout.write(check_tag(tag) + "\n")
        case ["check", folder]:
            sys.stdout.write("\n".join(check_dist(Path(folder))) + "\n")
        case _:
            raise SystemExit(__doc__)
