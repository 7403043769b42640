"""Writes pins.txt from what pip resolved: `pip install --dry-run --report - ... | python wheels/pins.py > pins.txt`."""

from __future__ import annotations

import json
import sys
from typing import Any

HEADER = """\
# What verbatim-rl with its extras proxy, rollout, archive and otel consists of, down to the last dependency.
# Written by `make pins`; CONTRIBUTING.md says when.
"""


def pins_of(report: dict[str, Any]) -> list[str]:
    """name==version of everything but the project itself, in order of names."""
    found = [item["metadata"] for item in report["install"] if not item["requested"]]
    return sorted(f"{metadata['name'].lower().replace('_', '-')}=={metadata['version']}" for metadata in found)


if __name__ == "__main__":
    sys.stdout.write(HEADER + "\n".join(pins_of(json.load(sys.stdin))) + "\n")
