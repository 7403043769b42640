"""Fixtures shared by all tests: real servers, each in a module of its own."""

from hypothesis import HealthCheck, settings
from redis_server import redis_kind, redis_server, redis_url, store
from vllm_server import tiny_model, vllm_server, vllm_url

__all__ = ["redis_kind", "redis_server", "redis_url", "store", "tiny_model", "vllm_server", "vllm_url"]

# Other tests run engines beside these: a slow example says nothing about the code.
settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
