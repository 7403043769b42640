"""Ages of groups: by how many versions the trainer was ahead of a group's oldest token. Counts of groups by age."""

from __future__ import annotations

from collections.abc import Mapping

Ages = Mapping[int, int]


def mean_age(ages: Ages) -> float:
    return sum(age * groups for age, groups in ages.items()) / sum(ages.values())


def shares_of(ages: Ages) -> str:
    """The share of each age, as text: `0:25% 1:75%`."""
    groups = sum(ages.values())
    return " ".join(f"{age}:{count / groups:.0%}" for age, count in sorted(ages.items()))
