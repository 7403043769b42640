"""The trainers' own types: the real ones where their package can be installed beside the rest, otherwise as recorded.

`trainer_types.json` holds the fields of the classes that cannot be installed here, with their annotations, taken from the
source it names. `recorded` makes a class of them that refuses unknown fields and values that are not of the annotated type.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, Dict, List, Optional, Union  # noqa: UP035  the annotations are spelt as the libraries spell them

from pydantic import TypeAdapter

_RECORD: dict[str, Any] = json.loads(Path(__file__).with_name("trainer_types.json").read_text())
_NAMES = {"Any": Any, "Dict": Dict, "List": List, "Optional": Optional, "Union": Union}  # noqa: UP006


def recorded_annotations(name: str) -> dict[str, str]:
    """The recorded fields of a class, by name, as its source spells their types."""
    fields: dict[str, str] = _RECORD[name]["fields"]
    return fields


def checked(name: str, values: dict[str, Any]) -> dict[str, Any]:
    """`values`, each known to `name` and of the type recorded for it; a type of the library's own or of torch is not looked
    at. Raises TypeError, pydantic.ValidationError."""
    known = recorded_annotations(name)
    if unknown := set(values) - set(known):
        raise TypeError(f"{name} has no {sorted(unknown)}")
    if missing := set(_RECORD[name]["required"]) - set(values):
        raise TypeError(f"{name} needs {sorted(missing)}")
    for field, value in values.items():
        _adapter(known[field]).validate_python(value, strict=True)
    return values


@cache
def recorded(name: str) -> Any:
    """A class with the recorded fields, all None unless given; with `Status` where the library's has one."""

    def check(self: Any) -> None:
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        checked(name, {field: value for field, value in given.items() if value is not None})

    members: dict[str, Any] = {"__post_init__": check}
    if statuses := _RECORD[name].get("statuses"):
        members["Status"] = Enum("Status", statuses)
        members["get_reward_value"] = lambda self, args: self.reward if not args.reward_key else self.reward[args.reward_key]
    fields = [(field, Any, dataclasses.field(default=None)) for field in recorded_annotations(name)]
    return dataclasses.make_dataclass(name.rpartition(".")[2], fields, namespace=members)


@contextmanager
def without_ray() -> Iterator[None]:
    """verl names Ray's types where it declares its own; what is tested here calls nothing of it. So an empty module stands in
    while verl is imported, and is gone afterwards: Ray itself is 240 MB."""
    there = dict(sys.modules)
    if "ray" not in there:
        sys.modules["ray"] = stand_in = ModuleType("ray")
        stand_in.ObjectRef = type("ObjectRef", (), {})  # type: ignore[attr-defined]
    try:
        yield
    finally:
        if "ray" not in there:
            del sys.modules["ray"]


def verl_module(name: str) -> ModuleType:
    with without_ray():
        return importlib.import_module(name)


@cache
def _adapter(annotation: str) -> TypeAdapter[Any]:
    try:
        return TypeAdapter(eval(annotation, dict(_NAMES)))
    except (NameError, AttributeError):
        return TypeAdapter(Any)


def callback(event: str, act: Callable[[], Any]) -> Any:
    """A callback of transformers' Trainer that acts at one event, such as `on_step_end`."""
    from transformers import TrainerCallback

    def run(*_: Any, **__: Any) -> None:
        act()

    made = TrainerCallback()
    setattr(made, event, run)
    return made
