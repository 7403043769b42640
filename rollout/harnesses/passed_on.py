"""What a task passes on to a harness beside its instruction, MCP servers and skills, held against what the harness takes."""

from __future__ import annotations

import re
from pathlib import PurePosixPath

from rollout.harnesses.definition import Harness
from rollout.harnesses.errors import NotTaken
from rollout.task import HarnessSpec, McpServer, Upload

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""What every harness takes as the name of a server."""


def check_taken(harness: Harness, spec: HarnessSpec) -> None:
    """Raises `NotTaken` for what the harness has no place for."""
    names = [server.name for server in spec.mcp_servers]
    for server in spec.mcp_servers:
        _check_server(harness, server)
        if names.count(server.name) > 1:
            raise NotTaken(f"two MCP servers are called {server.name!r}")
    for skill in spec.skills:
        _check_skill(harness, skill)


def _check_server(harness: Harness, server: McpServer) -> None:
    if harness.mcp is None:
        raise NotTaken(f"{harness.name} takes no MCP servers")
    if not NAME.match(server.name):
        raise NotTaken(f"{server.name!r} cannot be the name of an MCP server: 1 to 64 of letters, digits, '_' and '-'")
    if not (harness.mcp.command if server.url is None else harness.mcp.url):
        raise NotTaken(f"{harness.name} takes no MCP server by its {'command' if server.url is None else 'URL'}")


def _check_skill(harness: Harness, skill: Upload) -> None:
    if not harness.skills:
        raise NotTaken(f"{harness.name} takes no skills")
    parts = PurePosixPath(skill.path).parts
    if not parts or skill.path.startswith("/") or ".." in parts:
        raise NotTaken(f"skill {skill.path!r} is not a path below the harness's folder of skills")
