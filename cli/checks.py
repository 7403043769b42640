"""Checks of this machine that `verbatim doctor` and `verbatim generate` share: runtimes, readable paths, harnesses, disks."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cli.feedback import remove_controls

if TYPE_CHECKING:
    from rich.console import Console

    from rollout.harnesses.definition import Harness
    from rollout.runtimes.settings import RuntimeSettings

State = Literal["ok", "note", "fix"]
STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "fix": "bold red"}
EXTRAS = {
    "proxy": (
        "aiohttp",
        "fastapi",
        "httptools",
        "jinja2",
        "msgspec",
        "prometheus_client",
        "redis",
        "uvicorn",
        "uvloop",
    ),
    "rollout": ("aiohttp", "kubernetes", "msgspec", "pydantic_settings", "simpleeval", "yaml"),
    "archive": ("pyarrow",),
    "trainer": ("safetensors", "torch"),
}
"""What an extra's modules are, for those that commands need."""
LOW_BYTES = 10 * 2**30
FULL_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Check:
    """`note`: it works, or is not needed by everyone. `advice` is what to do."""

    about: str
    state: State
    found: str
    advice: str = ""


def print_checks(console: Console, checks: Sequence[Check]) -> None:
    from rich.text import Text

    width = max(len(check.about) for check in checks)
    for check in checks:
        line = Text(f"{check.state:<5}", STYLES[check.state]).append(f"{check.about:<{width}}  ", "bold")
        line.append(remove_controls(check.found), "")
        if check.advice:
            line.append(f"; {remove_controls(check.advice)}")
        console.print(line, soft_wrap=True, highlight=False)


async def check_runtimes(wanted: Sequence[str] = ()) -> list[Check]:
    """Whether the wanted kinds of runtimes work here. By default all kinds: then one that works is enough."""
    from rollout.runtimes import catalogue
    from rollout.runtimes.base import BadRuntime

    found, lacking = [], []
    for name in wanted or catalogue.list_names():
        try:
            kind = catalogue.load(name)
            why = await kind.probe()
        except BadRuntime as error:
            why = str(error)
        if why is None:
            found.append(Check(f"runtime {name}", "ok", kind.describe_limits()))
        else:
            lacking.append(Check(f"runtime {name}", "fix" if wanted else "note", why))
    if not found and not wanted:
        kinds = "bubblewrap for local runtimes, or docker, podman or apptainer"
        found.append(Check("runtimes", "fix", "no kind of runtime works here", f"rollouts need one: install {kinds}"))
    return [*found, *lacking]


def check_readable(settings: RuntimeSettings) -> list[Check]:
    """Whether the files and folders exist that sandboxes are to see."""
    if not settings.local_readable:
        return []
    missing = [path for path in settings.local_readable if not Path(path).exists()]
    if missing:
        advice = "correct VERBATIM_LOCAL_READABLE (files and folders, separated by colons)"
        return [Check("readable", "fix", f"there is no {', '.join(missing)}", advice)]
    return [Check("readable", "ok", f"sandboxes also see {', '.join(settings.local_readable)}")]


def check_harness(definition: Harness) -> Check | None:
    """The harness on this machine and its version; None if it is not installed here."""
    from rollout.harnesses.process import read_version

    if "{" in definition.argv[0] or (found := shutil.which(definition.argv[0])) is None:
        return None
    about = f"harness {definition.name}"
    if not definition.version_argv:
        return Check(about, "ok", found)
    version = read_version(definition.version_argv, os.environ, Path.cwd())
    if version == definition.version:
        return Check(about, "ok", f"{found}, version {version}")
    advice = f"its definition was tested with {definition.version}: compare the rows by role"
    return Check(about, "note", f"{found}, version {version or 'unknown'}", advice)


def check_disk(folder: Path, what: str) -> Check:
    """Free space where `folder` is, or would be created."""
    place = folder.absolute()
    while not place.exists():
        place = place.parent
    free = shutil.disk_usage(place).free
    found = f"{free / 2**30:.1f} GiB free for {what} in {folder}"
    if not os.access(place, os.W_OK):
        return Check("disk", "fix", f"{folder} is not writable", "choose another folder")
    if free < FULL_BYTES:
        return Check("disk", "fix", found, "free some, or choose another folder")
    return Check("disk", "note" if free < LOW_BYTES else "ok", found)


def check_disks(data: Path) -> list[Check]:
    """Free space for data and for temporary files, once if they share a disk."""
    temporary = Path(tempfile.gettempdir())
    checks = [check_disk(data, "data")]
    other = check_disk(temporary, "temporary files")
    return [*checks, other] if other.found.split(" for ")[0] != checks[0].found.split(" for ")[0] else checks
