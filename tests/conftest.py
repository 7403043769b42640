"""Fixtures shared by all tests: servers, each in a module of its own; what holds for a whole run is in tests/support."""

import pytest
from hypothesis import HealthCheck, settings

from tests.support.distributions import distributions
from tests.support.engine.local_format import qwen3_format
from tests.support.engine.scripted_fixtures import engine, engines, running, service, token_service
from tests.support.engine.vllm_server import tiny_model, vision_engine, vllm_server, vllm_url
from tests.support.engine.weight_fixtures import often_visited, unsampled, weights
from tests.support.runtimes.rollout_fixtures import world
from tests.support.runtimes.rollout_stores import stores
from tests.support.service.redis_server import redis_kind, redis_server, redis_url, shared_redis, store
from tests.support.service.scripted_service import scripted_server

__all__ = [
    "distributions",
    "engine",
    "engines",
    "often_visited",
    "qwen3_format",
    "redis_kind",
    "redis_server",
    "redis_url",
    "running",
    "scripted_server",
    "service",
    "shared_redis",
    "store",
    "stores",
    "tiny_model",
    "token_service",
    "unsampled",
    "vision_engine",
    "vllm_server",
    "vllm_url",
    "weights",
    "world",
]

pytest_plugins = ("tests.support.failures", "tests.support.whole_run")
# What is asserted in there says what was compared.
pytest.register_assert_rewrite("tests.support.engine.real_engine", "tests.support.sessions.conversations")

# Other tests run engines beside these: a slow example says nothing about the code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
