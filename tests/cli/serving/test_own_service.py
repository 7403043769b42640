"""What a service that a command starts for itself takes from the environment (the service itself: tests/cli/generation)."""

from __future__ import annotations

import pytest

from cli.serving.own_service import INHERITED_VARIABLES
from proxy.settings import Settings
from proxy.tasks.sweeper import RolloutSettings
from rollout.runtimes.settings import VARIABLES

OF_A_SERVICE = ("redis", "control", "public", "admin", "node", "tls", "group", "admission", "lease", "retention", "weights")
"""How settings begin that mean nothing to it, or would keep it waiting for trainers that it does not have."""


@pytest.mark.parametrize(
    "name", ["engine_api", "engine_api_key", "renderer", "frozen_models", "train_roles", "thinking", "call_limits"]
)
def test_engines_and_calls_are_as_the_environment_says(name: str) -> None:
    assert name in Settings.model_fields and INHERITED_VARIABLES.fullmatch(f"VERBATIM_{name.upper()}")


def test_a_machines_harnesses_evaluators_and_runtimes_are_as_the_environment_says() -> None:
    for variable in (*VARIABLES.values(), "VERBATIM_HARNESSES", "VERBATIM_EVALUATOR_GRADER", "PATH", "OTEL_SERVICE_NAME"):
        assert INHERITED_VARIABLES.fullmatch(variable), variable


def test_nothing_else_of_another_service_is_taken() -> None:
    of_a_service = [name for name in Settings.model_fields if name.startswith(OF_A_SERVICE)]
    for name in (*of_a_service, *RolloutSettings.model_fields, "engine", "url", "harness_url", "new"):
        assert not INHERITED_VARIABLES.fullmatch(f"VERBATIM_{name.upper()}"), name
