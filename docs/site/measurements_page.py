"""The page of measurements, from the committed results."""

from __future__ import annotations

from benchmarks import tables

HEAD = """# Measurements

What the service costs, beside its peers and by itself. Under each table are the machine, the day and the commit that was measured.
`benchmarks/README.md` in the repository says how each section is measured, and `make bench` repeats it.
"""


def render() -> str:
    return HEAD + tables.render(pictures="../../benchmarks/results")
