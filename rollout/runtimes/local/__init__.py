"""Runtimes on the node itself, in a sandbox or without one."""
