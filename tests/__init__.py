"""The tests, laid out as the packages are: tests/proxy/store tests proxy/store. What several of them share is in tests/support."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
