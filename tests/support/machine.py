"""The programs that tests need besides what pip installs; `make test-programs` installs them.

Run as a program it prints the missing Debian packages, one a line; it needs nothing but Python.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import NoReturn

from tests import ROOT

PATH = os.pathsep.join(
    (
        os.environ.get("PATH", ""),
        "/usr/sbin",
        *(str(ROOT / ".cache" / name / "usr/bin") for name in ("apptainer", "promtool", "valkey")),
    )
)
"""Where programs are looked for; `.ci/programs` fills the last three folders."""


@dataclass(frozen=True, slots=True)
class Need:
    program: str
    package: str
    """The Debian package that has it."""
    what_for: str
    unpacked: bool = False
    """Not installed by apt-get: `.ci/programs` unpacks it below `.cache`."""


NEEDS = (
    Need("bwrap", "bubblewrap", "sandboxes of rollouts"),
    Need("podman", "podman", "containers of rollouts"),
    Need("runc", "runc", "containers of rollouts"),
    Need("mksquashfs", "squashfs-tools", "images of apptainer"),
    Need("patchelf", "patchelf", "unpacking apptainer and valkey"),
    Need("chromium", "chromium", "the pages of /ui"),
    Need("chromedriver", "chromium-driver", "the pages of /ui"),
    Need("systemd-analyze", "systemd", "the units in deploy/systemd"),
    Need("nginx", "nginx-light", "the documented ways to put a proxy in front"),
    Need("promtool", "prometheus", "alert rules and dashboards", unpacked=True),
    Need("valkey-server", "valkey-server", "the store on Valkey", unpacked=True),
    Need("apptainer", "apptainer", "instances of rollouts", unpacked=True),
)
LEFT_OUT = frozenset(filter(None, os.environ.get("VERBATIM_TESTS_WITHOUT", "").split(",")))
"""Programs whose tests are left out on purpose."""


def find(program: str) -> str | None:
    """Its path, or None."""
    return shutil.which(program, path=PATH)


def require(program: str) -> str:
    """Its path; where it is missing the test is skipped, and fails with CI=true."""
    return find(program) or unavailable(f"{program} is not installed: `make test-programs` installs it")


def unavailable(reason: str) -> NoReturn:
    """Skip the test; fail it with CI=true, where nothing may be missing."""
    # Imported here: `.ci/programs` runs this module before pytest is installed.
    import pytest

    if os.environ.get("CI") == "true":
        pytest.fail(reason)
    pytest.skip(reason)


def missing() -> list[Need]:
    return [need for need in NEEDS if need.program not in LEFT_OUT and find(need.program) is None]


def shortage() -> str:
    """One sentence: the missing programs, what needs them, and what installs them; "" when there are none."""
    lacking = missing()
    if not lacking:
        return ""
    told = ", ".join(f"{need.program} ({need.what_for})" for need in lacking)
    return f"missing programs: {told}; on Debian `make test-programs` installs them"


if __name__ == "__main__":
    print("\n".join(need.package for need in missing() if not need.unpacked))  # noqa: T201
