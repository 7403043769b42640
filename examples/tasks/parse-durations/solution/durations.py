"""Durations as people write them."""

import re
from fractions import Fraction

UNITS = {"d": 86400, "h": 3600, "m": 60, "s": 1, "ms": Fraction(1, 1000)}
_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(ms|[dhms])", re.ASCII)
_NUMBER = re.compile(r"[0-9]+(?:\.[0-9]+)?", re.ASCII)


def parse(text):
    """The seconds of `text`, as README.md says."""
    bare = text.strip()
    sign, bare = (-1, bare[1:]) if bare.startswith("-") else (1, bare)
    seconds = Fraction(bare) if _NUMBER.fullmatch(bare) else _summed(bare, text)
    seconds *= sign
    return int(seconds) if seconds.denominator == 1 else float(seconds)


def _summed(bare, text):
    parts, at = [], 0
    while found := _PART.match(bare, at):
        parts.append(found.groups())
        at = found.end()
    places = [list(UNITS).index(unit) for _, unit in parts]
    whole = all("." not in number for number, _ in parts[:-1])
    if not parts or at != len(bare) or places != sorted(set(places)) or not whole:
        raise ValueError(f"{text!r} is no duration")
    return sum((Fraction(number) * UNITS[unit] for number, unit in parts), Fraction(0))
