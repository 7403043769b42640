"""Fixtures shared by all tests: real servers, each in a module of its own."""

from redis_server import redis_kind, redis_server, redis_url, store
from vllm_server import tiny_model, vllm_server, vllm_url

__all__ = ["redis_kind", "redis_server", "redis_url", "store", "tiny_model", "vllm_server", "vllm_url"]
