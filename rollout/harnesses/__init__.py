"""Harnesses as data: how each is installed, started and pointed at a session, in one TOML file each."""
