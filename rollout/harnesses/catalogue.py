"""Finding definitions: built-in ones, those in a user's folder, and files named by path."""

from __future__ import annotations

import os
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.harnesses.definition import Harness, parse
from rollout.harnesses.prepared import (
    BadDefinition,
    UnknownHarness,
)

if TYPE_CHECKING:
    from rollout.task import HarnessSpec

BUILT_IN = Path(__file__).with_name("definitions")
VARIABLE = "VERBATIM_HARNESSES"


def names() -> list[str]:
    """The names that `load` accepts, sorted."""
    return sorted(_find_files())


def load(name_or_path: str) -> Harness:
    """The harness of that name, or in that `.toml` file. A definition in the user's folder wins over a built-in one. Raises
    `UnknownHarness` or `BadDefinition`."""
    if name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    found = _find_files()
    if name_or_path not in found:
        raise UnknownHarness(
            f"there is no harness {name_or_path!r}: choose one of {', '.join(sorted(found))}, or give the path of a .toml file"
        )
    return _read(found[name_or_path])


def _find_files() -> dict[str, Path]:
    """Name -> file. Files are named after their harness, so listing them reads none."""
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
