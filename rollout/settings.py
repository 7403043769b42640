"""What a server is told of the rollout service; the environment is read here. Each field is `VERBATIM_<NAME>`."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class RolloutSettings(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="VERBATIM_", extra="ignore", use_attribute_docstrings=True)

    task_retain_days: Annotated[float, Field(ge=0)] = 30.0
    """How long an ended task is kept in the store; 0: for ever. Its sessions are kept by rules of their own."""
    task_sweep_seconds: Annotated[float, Field(gt=0)] = 2.0
    """How often a server looks for sessions to close and callbacks to deliver."""
    lost_node_seconds: Annotated[float, Field(gt=0)] = 300.0
    """Silence of a node after which a server ends or finishes what it can of the node's rollouts itself. Other nodes take them long
    before that, where there are any that may."""
