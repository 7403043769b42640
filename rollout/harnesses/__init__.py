"""Harnesses as data: one TOML file each says how to install it, start it and point it at a session."""
