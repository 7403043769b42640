"""How pydantic reads the dataclasses of this package, which does not import it.

They are `Wire`, with `RULES`. Limits are those of `annotated_types`. What neither can say is a mark beside the type: pydantic asks it for
its schema, a plain dict.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgpack
from annotated_types import Gt, MaxLen, MinLen

RULES: dict[str, Any] = {
    "extra": "forbid",
    "strict": True,
    "validate_by_name": True,
    "use_attribute_docstrings": True,
    # An answer has all of its fields, also those that a request may leave out.
    "json_schema_serialization_defaults_required": True,
}


class Wire:
    """Base of the dataclasses."""

    __slots__ = ()
    __pydantic_config__ = RULES


def show(example: Any) -> dict[str, Any]:
    """What a class with an example adds to its rules."""
    return {"json_schema_extra": {"example": example}}


def spell(**names: str) -> dict[str, Any]:
    """What a class adds to its rules, some of whose fields have other names in JSON."""
    return {"alias_generator": lambda name: names.get(name, name)}


@dataclass(frozen=True, slots=True)
class Reads:
    """Sets an option of the schema by which the type is read."""

    option: str
    value: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {**handler(source), self.option: self.value}


FINITE = Reads("allow_inf_nan", False)
LIST_OR_TUPLE = Reads("strict", False)


@dataclass(frozen=True, slots=True)
class Checks:
    """Takes what `check` returns for the value that was read. `check` raises ValueError. `shown`: what the JSON schema says of it."""

    check: Callable[[Any], Any]
    shown: tuple[tuple[str, Any], ...] = ()

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": self.check},
            "schema": handler(source),
        }

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> dict[str, Any]:
        return {**handler(schema), **dict(self.shown)}


@dataclass(frozen=True, slots=True)
class ChecksJson:
    """As `Checks`, for JSON alone: what is stored was checked before."""

    check: Callable[[Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        def check(given: Any, info: Any) -> Any:
            return self.check(given) if info.mode == "json" else given

        return {"type": "function-after", "function": {"type": "with-info", "function": check}, "schema": handler(source)}


@dataclass(frozen=True, slots=True)
class Expands:
    """Reads what `expand` makes of the given value. `shown`: the type that a caller may give, for the JSON schema."""

    expand: Callable[[Any], Any]
    shown: Any

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {
            "type": "function-before",
            "function": {"type": "no-info", "function": self.expand},
            "schema": handler(source),
            "json_schema_input_schema": handler.generate_schema(self.shown),
        }


@dataclass(frozen=True, slots=True)
class InJson:
    """JSON has the type as the dataclass `body`, whose `value()` is of the type."""

    body: type[Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        body = handler.generate_schema(self.body)
        read = {"type": "no-info", "function": lambda given: given.value()}
        return {
            "type": "json-or-python",
            "json_schema": {"type": "function-after", "function": read, "schema": body},
            "python_schema": handler(source),
        }


@dataclass(frozen=True, slots=True)
class Writes:
    """Writes the type as `write(value, info)` says."""

    write: Callable[[Any, Any], Any]

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        return {**handler(source), "serialization": {"type": "function-plain", "function": self.write, "info_arg": True}}


@dataclass(frozen=True, slots=True)
class SpeltAs:
    """Reads a mapping by the fields of the dataclass `body`, without those that are null; where `or_null`, null is an empty one."""

    body: type[Any]
    or_null: bool = False

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> dict[str, Any]:
        body = handler.generate_schema(self.body)
        return {
            "type": "function-after",
            "function": {"type": "no-info", "function": drop_nulls},
            "schema": {"type": "nullable", "schema": body} if self.or_null else body,
            "serialization": {"type": "any"},
        }

    def __get_pydantic_json_schema__(self, schema: Any, handler: Any) -> Any:
        return handler(schema["schema"])


def drop_nulls(given: Any) -> dict[str, Any]:
    """The fields of a dataclass that are not None, by name; of None none."""
    found = {} if given is None else {each.name: getattr(given, each.name) for each in fields(given)}
    return {name: value for name, value in found.items() if value is not None}


def _check_storable(given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        msgpack.packb(given)
    except OverflowError as error:
        raise ValueError("cannot be stored: an integer needs more than 64 bits") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(f"cannot be stored: {error}") from error
    return given


def _check_url(url: str) -> str:
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ValueError(f"{url!r} is no http or https URL")
    return url


def _check_finite(given: Mapping[str, Any]) -> Mapping[str, Any]:
    try:
        json.dumps(given, allow_nan=False)
    except ValueError as error:
        raise ValueError("numbers must be finite: JSON has no others, so answers could not be read") from error
    return given


Name = Annotated[str, MinLen(1), MaxLen(256)]
Seconds = Annotated[float, Gt(0), FINITE]
Json = Annotated[Mapping[str, Any], ChecksJson(_check_finite)]
"""An object whose fields only its reader knows."""
HttpUrl = Annotated[str, Checks(_check_url, (("pattern", "^https?://"),))]
Metadata = Annotated[Mapping[str, Any], Checks(_check_storable)]
"""Any JSON object whose integers fit into 64 bits."""
