"""The plugin refuses a vLLM that it was not tested with, by name, and says what to do."""

from __future__ import annotations

import pytest

from proxy.engine.in_vllm.plugin import UNTESTED_VARIABLE, check_version


@pytest.mark.parametrize("version", ["0.32.0", "0.32.7", "0.32.0+cpu", "0.32.1rc1"])
def test_a_tested_vllm_starts(version: str) -> None:
    check_version(version)


@pytest.mark.parametrize("version", ["0.31.9", "0.33.0", "1.32.0", "0.3.2"])
def test_another_vllm_does_not(version: str) -> None:
    with pytest.raises(RuntimeError, match=rf"not with {version}: take it out of VLLM_PLUGINS .*{UNTESTED_VARIABLE}=1"):
        check_version(version)


def test_an_operator_may_try_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(UNTESTED_VARIABLE, "1")
    check_version("0.33.0")
