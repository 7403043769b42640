"""Finding definitions: built-in ones, those in a user's folder, and files named by path."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from rollout.harnesses.definition import Harness, parse
from rollout.harnesses.prepared import (
    BadDefinition,
    UnknownHarness,
)

if TYPE_CHECKING:
    from contract.tasks import HarnessSpec

BUILT_IN = Path(__file__).with_name("definitions")
VARIABLE = "VERBATIM_HARNESSES"


def names() -> list[str]:
    """The names that `load` accepts, sorted."""
    return sorted({*load_built_in(), *_find_own()})


def load(name_or_path: str) -> Harness:
    """The harness of that name, or in that `.toml` file. A definition in the user's folder wins over a built-in one. Raises
    `UnknownHarness` or `BadDefinition`."""
    if name_or_path.endswith(".toml"):
        return _read(Path(name_or_path))
    if (own := _find_own().get(name_or_path)) is not None:
        return _read(own)
    if (text := load_built_in().get(name_or_path)) is not None:
        return _parse(text, BUILT_IN / f"{name_or_path}.toml")
    raise UnknownHarness(
        f"there is no harness {name_or_path!r}: choose one of {', '.join(names())}, or give the path of a .toml file"
    )


@cache
def load_built_in() -> Mapping[str, str]:
    """The built-in definitions by name, not parsed. All at once: another install may take this one's place while the process runs."""
    return {path.stem: path.read_text(encoding="utf-8") for path in BUILT_IN.glob("*.toml")}


def _find_own() -> dict[str, Path]:
    """The files of the user's folder by name. Files are named after their harness, so listing them reads none."""
    if not (given := os.environ.get(VARIABLE)):
        return {}
    folder = Path(given).expanduser()
    if not folder.is_dir():
        raise UnknownHarness(f"{VARIABLE} names {given}, which is not a directory")
    return {path.stem: path for path in folder.glob("*.toml")}


def _read(path: Path) -> Harness:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UnknownHarness(f"the definition {path} cannot be read: {error}") from error
    return _parse(text, path)


def _parse(text: str, path: Path) -> Harness:
    try:
        return parse(tomllib.loads(text), path.stem)
    except tomllib.TOMLDecodeError as error:
        raise BadDefinition(f"{path}: {error}") from error
    except BadDefinition as error:
        raise type(error)(f"{path}: {error}") from error


def find_definition(spec: HarnessSpec) -> Harness:
    """The harness that the task names or defines. Raises `HarnessError`."""
    return load(spec.name) if spec.definition is None else parse(spec.definition, spec.name)
