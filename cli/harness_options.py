"""Options of the commands that open a session for a harness."""

from __future__ import annotations

from typing import Annotated

import typer

HarnessName = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="aider, claude-code, cline, codex, continue, copilot-cli, droid, gemini-cli, gptme, kilo, kimi-cli, llm, mini-swe-agent, "
        "mistral-vibe, openai-agents, opencode, openhands, pi, qwen-code, shell, a definition in the folder VERBATIM_HARNESSES, or the "
        "path of a .toml file.",
    ),
]
SessionId = Annotated[str | None, typer.Option(metavar="ID", help="The new session's id. Default: a random one.")]
ModelName = Annotated[
    str | None, typer.Option(metavar="M", help="The model to ask for. Default: the first one the service names.")
]
ServiceUrl = Annotated[
    str | None, typer.Option(metavar="URL", help="Where the service is. Default: VERBATIM_URL, or http://127.0.0.1:8700.")
]
