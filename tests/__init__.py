"""The tests, laid out as the packages are: tests/proxy/store holds those of proxy/store. What several of them need is in tests/support."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
