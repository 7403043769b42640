"""The definitions there are: the built-in ones, those of a user's directory, and any file named by its path."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path

from rollout.harnesses.definition import Harness, parse
from rollout.harnesses.prepared import (
    BadDefinition,
    UnknownHarness,
)
from rollout.task import HarnessSpec

BUILT_IN = Path(__file__).with_name("definitions")
VARIABLE = "VERBATIM_HARNESSES"


def names() -> list[str]:
    """The names that `load` knows, sorted."""
    return sorted(_found())


def load(name_or_path: str) -> Harness:
    """The harness of that name, or of that `.toml` file. Raises `UnknownHarness` or `BadDefinition`.

    A definition in the user's directory wins over a built-in one of its name."""
    if name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    found = _found()
    if name_or_path not in found:
        raise UnknownHarness(
            f"there is no harness {name_or_path!r}: choose one of {', '.join(sorted(found))}, or give the path of a .toml file"
        )
    return _read(found[name_or_path])


def _found() -> dict[str, Path]:
    """Name -> file. Files are named for their harness, so that listing them reads none."""
    folders = [BUILT_IN]
    if given := os.environ.get(VARIABLE):
        folders.append(Path(given).expanduser())
        if not folders[-1].is_dir():
            raise UnknownHarness(f"{VARIABLE} names {given}, which is not a directory")
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def _read(path: Path) -> Harness:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownHarness(f"the definition {path} cannot be read: {error}") from error
    try:
        return parse(tomllib.loads(text), path.stem)
    except tomllib.TOMLDecodeError as error:
        raise BadDefinition(f"{path}: {error}") from error
    except BadDefinition as error:
        raise type(error)(f"{path}: {error}") from error


def find_definition(spec: HarnessSpec) -> Harness:
    """The harness that the task names or defines. Raises `HarnessError`."""
    return load(spec.name) if spec.definition is None else parse(spec.definition, spec.name)
