"""Completion in shells: what the installed command answers to what each shell asks."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.service.verbatim_process import environment

VERBATIM = Path(sys.executable).with_name("verbatim")


def ask(**variables: str) -> str:
    done = subprocess.run([VERBATIM], env=environment(**variables), capture_output=True, text=True, check=False)
    return done.stdout


def test_bash_completes_commands_and_options() -> None:
    """By its own means: the function that the script defines, called as bash calls it."""
    script = """
eval "$(_VERBATIM_COMPLETE=source_bash verbatim)"
COMP_WORDS=(verbatim weights ro) COMP_CWORD=2; _verbatim_completion verbatim; echo "${COMPREPLY[@]}"
COMP_WORDS=(verbatim serve --data) COMP_CWORD=2; _verbatim_completion verbatim; echo "${COMPREPLY[@]}"
complete -p verbatim
"""
    variables = environment(PATH=f"{VERBATIM.parent}:/usr/bin:/bin")
    done = subprocess.run(["bash", "-c", script], env=variables, capture_output=True, text=True, check=False)
    commands, options, registered = done.stdout.splitlines()
    assert (commands, options) == ("rollback", "--data-dir"), done.stderr
    assert "_verbatim_completion" in registered


@pytest.mark.parametrize(
    ("shell", "registers"), [("zsh", "compdef _verbatim_completion verbatim"), ("fish", "complete --command verbatim")]
)
def test_zsh_and_fish_get_a_script_and_the_commands(shell: str, registers: str) -> None:
    assert registers in ask(_VERBATIM_COMPLETE=f"source_{shell}")
    asked = {"_TYPER_COMPLETE_ARGS": "verbatim weights ro", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    assert "rollback" in ask(_VERBATIM_COMPLETE=f"complete_{shell}", **asked)


def test_help_says_how_to_install_it() -> None:
    done = subprocess.run([VERBATIM, "--help"], env=environment(), capture_output=True, text=True, check=True)
    assert "--install-completion" in done.stdout
