"""What `make` installs with: uv as pip is configured, and pip itself where uv is not to be had."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from tests import ROOT

CONFIGURED = """:env:.find-links='/wheels'
global.cert='/certificates.crt'
global.extra-index-url='https://one/simple https://two/simple'
global.find-links='/other/wheels'
"""
"""What `pip config list` prints."""
TOLD = "--index https://one/simple --index https://two/simple --find-links /wheels"
WORDS = ["install", "--quiet", "--python", "other/bin/python", "--requirement", "agent.txt"]


def write_program(path: Path, *lines: str) -> None:
    path.write_text("\n".join(("#!/bin/sh", *lines)))
    path.chmod(0o755)


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, *, uv_ends: int | None) -> list[str]:
    """The command lines of uv and pip, in order; `uv_ends`: uv's exit code, or None where there is no uv."""
    (folder / "configured").write_text(CONFIGURED)
    write_program(
        folder / "python", f'case "$*" in *"config list") cat {folder}/configured;; *) echo python "$@" >> {folder}/run;; esac'
    )
    if uv_ends is not None:
        write_program(folder / "uv", f'echo uv "$SSL_CERT_FILE" "$@" >> {folder}/run', f"exit {uv_ends}")
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setattr(sys, "argv", ["pip", *WORDS])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(ROOT / ".ci/pip"), run_name="__main__")
    assert ended.value.code == 0
    return (folder / "run").read_text().splitlines()


UV = f"uv /certificates.crt pip install --python other/bin/python {TOLD} --quiet --requirement agent.txt"
PIP = "python -m pip --disable-pip-version-check --python other/bin/python install --no-compile --quiet --requirement agent.txt"


@pytest.mark.parametrize(("uv_ends", "run"), [(0, [UV]), (1, [UV, PIP]), (None, [PIP])])
def test_uv_installs_as_pip_is_configured_and_pip_where_uv_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uv_ends: int | None, run: list[str]
) -> None:
    assert install(tmp_path, monkeypatch, uv_ends=uv_ends) == run
