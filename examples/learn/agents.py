"""The command-line agents that learn, unmodified: their harness in a task's body, and what a model is told by them and answers.

Flags and files that the agents themselves offer make their prompts short: on a CPU a prompt costs what it is long.
"""

from __future__ import annotations

import json
import os
import shutil
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from examples.learn.exercises import Exercise, make_check
from rollout.harnesses.catalogue import BUILT_IN
from rollout.runtimes.settings import SYSTEM_PATH

Message = Mapping[str, Any]

INSTALLED = Path(__file__).resolve().parents[2] / ".cache" / "harnesses"
"""Where make puts them."""
SYSTEM = "You are an agent with a shell."
LONGEST_REPLY = 60
MOST_CALLS = 4
MOST_SECONDS = 240

# Jinja's braces have blanks inside, unlike a definition's placeholders.
MINI_CONFIG = f"""\
agent:
  system_template: {SYSTEM}
  instance_template: "{{{{ task }}}}"
  step_limit: {MOST_CALLS}
  cost_limit: 0
environment:
  env: {{PAGER: cat}}
model:
  observation_template: |
    exit code {{{{ output.returncode }}}}
    {{{{ output.output[:400] }}}}
"""


@dataclass(frozen=True, slots=True)
class CliAgent:
    """`harness` is the field of a task. Both agents have a tool `bash` with a `command`, described by `tools` as the engine's template
    gets it; `observe` is what the tool answers to a command that prints nothing. `end` is the model's last turn: a text, or with
    `ends_by_command` a command. `told` is an expression in Python, evaluated in the agent's home once it has ended: the tokens that its
    own records say it was given."""

    name: str
    harness: Mapping[str, Any]
    system: str
    tools: Sequence[Mapping[str, Any]]
    observe: str
    end: str
    ends_by_command: bool
    told: str

    def play(self, exercise: Exercise, command: str) -> list[Message]:
        """The whole conversation of a model that runs `command` and ends."""
        opening = [{"role": "system", "content": self.system}, {"role": "user", "content": exercise.instruction}]
        acted = [_call(command, "call_1"), {"role": "tool", "tool_call_id": "call_1", "content": self.observe}]
        last = _call(self.end, "call_2") if self.ends_by_command else {"role": "assistant", "content": self.end}
        return [*opening, *acted, last]


def _call(command: str, call_id: str) -> Message:
    function = {"name": "bash", "arguments": json.dumps({"command": command})}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": call_id, "type": "function", "function": function}]}


def _tool(description: str, parameters: Mapping[str, Any], **more: Any) -> Mapping[str, Any]:
    return {"type": "function", "function": {"name": "bash", "description": description, "parameters": parameters, **more}}


def _define(name: str, more: Sequence[str], files: Mapping[str, str]) -> dict[str, Any]:
    """The built-in definition with further flags and files."""
    built_in = tomllib.loads((BUILT_IN / f"{name}.toml").read_text())
    changed = {"name": name, "argv": [*built_in["argv"], *more], "files": {**built_in.get("files", {}), **files}}
    return {"definition": {**built_in, **changed}}


_TEXT = {"type": "string"}
_PI_TOOL = _tool(
    "Execute a bash command in the current working directory. Returns stdout and stderr. Output is truncated to last 2000 lines or 50KB "
    "(whichever is hit first). If truncated, full output is saved to a temp file. Optionally provide a timeout in seconds.",
    {
        "type": "object",
        "required": ["command"],
        "properties": {
            "command": {**_TEXT, "description": "Bash command to execute"},
            "timeout": {"type": "number", "description": "Timeout in seconds (optional, no default timeout)"},
        },
    },
    strict=False,
)
_MINI_TOOL = _tool(
    "Execute a bash command",
    {
        "type": "object",
        "properties": {"command": {**_TEXT, "description": "The bash command to execute"}},
        "required": ["command"],
    },
)
_PI_TOLD = """sum(
    line["message"]["usage"]["output"]
    for file in pathlib.Path.home().glob(".pi/agent/sessions/*/*.jsonl")
    for line in map(json.loads, file.read_text().splitlines())
    if line.get("message", {}).get("role") == "assistant"
)"""
_MINI_TOLD = """sum(
    message["extra"]["response"]["usage"]["completion_tokens"]
    for message in json.loads((pathlib.Path.home() / "trajectory.json").read_text())["messages"]
    if "response" in message.get("extra", {})
)"""

AGENTS: Mapping[str, CliAgent] = {
    agent.name: agent
    for agent in (
        CliAgent(
            name="pi",
            harness=_define("pi", ["--system-prompt", SYSTEM, "--tools", "bash"], {}),
            # It appends the two lines to any system prompt.
            system=f"{SYSTEM}\nCurrent date: {date.today()}\nCurrent working directory: /workspace",
            tools=[_PI_TOOL],
            observe="(no output)",
            end="Done.",
            ends_by_command=False,
            told=_PI_TOLD,
        ),
        CliAgent(
            name="mini-swe-agent",
            harness=_define("mini-swe-agent", ["--config", "{home}/short.yaml"], {"short.yaml": MINI_CONFIG}),
            system=SYSTEM,
            tools=[_MINI_TOOL],
            observe="exit code 0\n",
            end="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
            ends_by_command=True,
            told=_MINI_TOLD,
        ),
    )
}


def make_task(task_id: str, exercise: Exercise, agent: CliAgent, rollouts: int) -> dict[str, Any]:
    """What to POST to /tasks. Its rollouts are one group, which does not wait for any that failed."""
    uploads = [{"upload": {"path": name, "text": content}} for name, content in exercise.files.items()]
    return {
        "task_id": task_id,
        "instruction": exercise.instruction,
        "harness": dict(agent.harness),
        "model": "policy",
        "num_samples": rollouts,
        # The stored logprobs are then exactly those of the policy that sampled.
        "sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": LONGEST_REPLY},
        "prepare": uploads,
        "runtime": {"kind": "local", "cpus": 1, "memory_mb": 1024},
        # A command may wait for ever.
        "budgets": {"max_calls": MOST_CALLS, "agent_seconds": MOST_SECONDS},
        "evaluator": make_check(exercise, agent.told),
        "group": {"policy": "allow_partial", "minimum": 1, "zero_variance": "keep"},
        "metadata": {"label": exercise.kind, "agent": agent.name},
    }


def with_agents(*first: Path) -> dict[str, str]:
    """The variables with which sandboxes of a node have the installed agents on PATH, behind the environments of Python named `first`."""
    if not INSTALLED.exists():
        raise RuntimeError("no agent is installed: `make harnesses` installs them")
    nodes = [Path(node)] if (node := shutil.which("node")) else []
    folders = [INSTALLED / "npm" / "node_modules" / ".bin", *sorted(INSTALLED.glob("*/bin"))]
    # Last, so that a command of the system goes before one of the same name in an agent's environment.
    path = [
        *(str(each / "bin") for each in first),
        SYSTEM_PATH,
        *(str(node.parent) for node in nodes),
        *(str(folder.resolve()) for folder in folders),
    ]
    environments = [*first, *(each.parents[1] for each in INSTALLED.glob("*/bin/python3"))]
    pythons = [(each / "bin" / "python3").resolve() for each in environments]
    homes = [INSTALLED.resolve(), *first, *(program.parents[1] for program in (*(node.resolve() for node in nodes), *pythons))]
    return {"VERBATIM_LOCAL_PATH": os.pathsep.join(path), "VERBATIM_LOCAL_READABLE": os.pathsep.join(_outside(homes))}


def _outside(folders: Sequence[Path]) -> list[str]:
    """Those that a sandbox does not see anyway."""
    return sorted({str(folder) for folder in folders if not folder.is_relative_to("/usr")})
