"""Runtimes in pods."""
