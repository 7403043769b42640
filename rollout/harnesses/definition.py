"""The definition of one harness: its fields and their rules, and preparing it for a session."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from math import inf
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from contract.tasks import MOST_BYTES
from reconstruct.roles import RoleRule
from rollout.harnesses.limits import UNKNOWN, Limits
from rollout.harnesses.mcp import McpForm, parse_form
from rollout.harnesses.prepared import (
    BASE_URL,
    LIMITS,
    BadDefinition,
    NotTaken,
    OutsideHome,
    Prepared,
    PromptTooLong,
    SessionAccess,
    UnknownField,
    check,
    fill,
    fill_file,
    lacks_limit,
    uses,
    uses_base_url,
)

if TYPE_CHECKING:
    from contract.tasks import HarnessSpec, McpServer, Upload

STDIN = ("none", "inherit", "prompt")
OTHERS_BYTES = 4096
"""Reserved for the values of placeholders other than the prompt."""
MOST_OF_ITS_OWN = 125
"""Exit codes above it are those of a shell: not executable, not found, ended by a signal."""
SCRIPT = ".verbatim-command"
"""Below the home: a command line that is too long for an argument."""

_NAME = re.compile(r"[a-z0-9][a-z0-9._-]*\Z")
_NAME_RULE = "is not made of lower-case letters, digits, '.', '_' and '-'"
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*\Z")


_OPENAI = {
    "OPENAI_BASE_URL": "{openai}",
    "OPENAI_API_BASE": "{openai}",
    "OPENAI_API_KEY": "{api_key}",
    "OPENAI_MODEL": "{model}",
}
_ANTHROPIC = {"ANTHROPIC_BASE_URL": "{anthropic}", "ANTHROPIC_API_KEY": "{api_key}", "ANTHROPIC_MODEL": "{model}"}
_GEMINI = {
    "GOOGLE_GEMINI_BASE_URL": "{gemini}",
    "GEMINI_API_KEY": "{api_key}",
    "GOOGLE_API_KEY": "{api_key}",
    "GEMINI_MODEL": "{model}",
}
_USUAL = {"chat": _OPENAI, "completions": _OPENAI, "responses": _OPENAI, "messages": _ANTHROPIC, "gemini": _GEMINI}
"""What the vendors' clients and most agents read, by dialect."""


@dataclass(frozen=True, slots=True)
class Harness:
    """How to start one harness against a session. The texts of `argv`, `env` and `files` may hold placeholders (`prepared.NAMES`). Raises
    `BadDefinition`."""

    name: str
    description: str
    """One line, or empty."""
    dialect: str
    """The wire dialect it speaks, or "any". The service may have dialects of other packages, so every name is valid here."""
    argv: tuple[str, ...] = ()
    """The command. Empty: the task's instruction is the command."""
    version: str = ""
    """The version that the definition was tested with."""
    version_argv: tuple[str, ...] = ()
    """The command that prints the installed version. Empty: it is not checked."""
    install: tuple[str, ...] = ()
    """Shell lines that install it."""
    env: Mapping[str, str] = field(default_factory=dict)
    """See `variables`."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Path below the home -> text."""
    stdin: str = "none"
    """none: empty. inherit: the caller's stdin. prompt: the prompt."""
    unset: tuple[str, ...] = ()
    """Further variables to withhold (`prepared.is_withheld` has those that always are)."""
    mcp: McpForm | None = None
    """How MCP servers are configured; None: it accepts none."""
    skills: str = ""
    """Folder below the home where it looks for skills, each a folder with a SKILL.md; empty: it accepts none."""
    roles: tuple[RoleRule, ...] = ()
    """The roles of calls whose headers do not tell: the first rule that matches a call applies."""
    finished_exit_codes: tuple[int, ...] = ()
    """The exit codes other than 0 of a harness that may have finished its work: see `has_finished`."""

    def __post_init__(self) -> None:
        if not _NAME.match(self.name):
            raise BadDefinition(f"name: {self.name!r} {_NAME_RULE}")
        if not _NAME.match(self.dialect):
            raise BadDefinition(f"{self.name}: dialect: {self.dialect!r} {_NAME_RULE}")
        if self.stdin not in STDIN:
            raise BadDefinition(f"{self.name}: stdin cannot be {self.stdin!r}: choose one of {', '.join(STDIN)}")
        for code in self.finished_exit_codes:
            if not 1 <= code <= MOST_OF_ITS_OWN:
                raise BadDefinition(f"{self.name}: finished_exit_codes: {code} is not one of 1 to {MOST_OF_ITS_OWN}")
        for variable in (*self.env, *self.unset):
            if not _VARIABLE.match(variable):
                raise BadDefinition(f"{self.name}: {variable!r} is not the name of an environment variable")
        for path in (*self.files, *([self.mcp.file] if self.mcp else []), *([self.skills] if self.skills else [])):
            self._check_path(path)
        for where, text in self._list_texts():
            check(text, f"{self.name}: {where}")

    @property
    def variables(self) -> Mapping[str, str]:
        """`env`, with the usual variables of the dialect if the definition uses neither a base URL nor the key: the agent would start
        without them, and fail with an error of its own. Those of every dialect for "any" and for one that another package adds."""
        texts = (*self.argv, *self.env.values(), *self.files.values())
        if any(uses(text, "api_key") or uses_base_url(text) for text in texts):
            return self.env
        return {**_USUAL.get(self.dialect, _OPENAI | _ANTHROPIC | _GEMINI), **self.env}

    @property
    def takes_command(self) -> bool:
        """Whether it runs the caller's command instead of taking a prompt."""
        return not self.argv

    @property
    def takes_prompt(self) -> bool:
        return self.takes_command or self.stdin == "prompt" or any(uses(text, "prompt") for _, text in self._list_texts())

    @property
    def takes_model(self) -> bool:
        return any(uses(text, "model") for _, text in self._list_texts())

    @property
    def takes_limits(self) -> bool:
        """Whether it is configured with the window, or with a limit that is derived from it."""
        return any(uses(text, name) for _, text in self._list_texts() for name in LIMITS)

    def prepare(
        self,
        endpoint: SessionAccess,
        model: str,
        prompt: str | Sequence[str],
        home: Path,
        *,
        workdir: Path | None = None,
        servers: Sequence[McpServer] = (),
        limits: Limits = UNKNOWN,
    ) -> Prepared:
        """The harness ready to run in `workdir` (default: the current directory) with `home` as its home.

        Several words are joined with spaces to the prompt; a harness that takes a command runs them as the command, and a single text as
        a line of `sh`. `servers` are MCP servers that `check_accepted` has accepted. Words, variables and lines that need one of `limits`
        which is unknown are left out. Raises `UnknownBaseUrl`."""
        words = [prompt] if isinstance(prompt, str) else list(prompt)
        values = {**endpoint.base_urls, **{BASE_URL + name: url for name, url in endpoint.base_urls.items()}}
        values |= {"api_key": endpoint.api_key, "model": model, "prompt": " ".join(words)}
        values |= {"home": str(home), "workdir": str(workdir or Path.cwd()), **limits.values()}
        argv = tuple(fill(text, values) for text in self.argv if not lacks_limit(text, values))
        files = {path: fill_file(path, text, values) for path, text in self.files.items()}
        if self.takes_command and isinstance(prompt, str):
            argv = ("sh", "-c", prompt)
            if _count_bytes(prompt) > MOST_BYTES:
                argv, files[SCRIPT] = ("sh", str(home / SCRIPT)), prompt
        elif self.takes_command:
            argv = tuple(words)
        if servers and self.mcp is not None:
            files[self.mcp.file] = self.mcp.write(files.get(self.mcp.file, ""), servers)
        return Prepared(
            argv=argv,
            env={name: fill(text, values) for name, text in self.variables.items() if not lacks_limit(text, values)},
            files=files,
            unset=self.unset,
            stdin=values["prompt"].encode() if self.stdin == "prompt" else b"",
        )

    def has_finished(self, exit_code: int, calls: Sequence[Mapping[str, Any]]) -> bool:
        """Whether a run that ended with `exit_code` had done its work. `calls` are the session's, in any order.

        0 means yes. A code of `finished_exit_codes` does where the agent's last call, side calls aside, ended the work: the whole reply
        reached the agent, it ended by itself, and it calls no tool, or none that could be parsed."""
        if exit_code not in self.finished_exit_codes:
            return exit_code == 0
        last = find_last_call(calls)
        return last is not None and _ends_work(last)

    def check_prompt(self, prompt: str) -> None:
        """Raises `PromptTooLong` if the system would not pass an argument or variable that contains the prompt."""
        passed = [text for where, text in self._list_texts() if not where.startswith("file ") and uses(text, "prompt")]
        if not passed or self.takes_command:
            return
        if "\0" in prompt:
            raise PromptTooLong(f"it holds a null byte, and {self.name} takes it as an argument, which ends at one")
        if _count_bytes(prompt) + max(_count_bytes(text) for text in passed) + OTHERS_BYTES > MOST_BYTES:
            raise PromptTooLong(
                f"it has {_count_bytes(prompt)} bytes, and {self.name} takes it as an argument, of which the system passes {MOST_BYTES}: "
                "upload long text as a file and give its path here"
            )

    def _list_texts(self) -> list[tuple[str, str]]:
        """(where, text) of everything that may hold placeholders."""
        texts = [("argv", text) for text in self.argv]
        texts += [(f"env {name}", text) for name, text in self.variables.items()]
        return texts + [(f"file {path}", text) for path, text in self.files.items()]

    def _check_path(self, path: str) -> None:
        parts = PurePosixPath(path).parts
        if not parts or path.startswith("/") or ".." in parts or "\0" in path or path.endswith("/"):
            raise OutsideHome(f"{self.name}: file {path!r} is not a path relative to the home that stays below it")


def find_last_call(calls: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The agent's own last call: side calls and candidates that were not chosen are none."""
    own = [call for call in calls if call.get("role") != "side" and call.get("lookahead") != "not_chosen"]
    return max(own, key=lambda call: call["started_at"], default=None)


def find_unserved(calls: Sequence[Mapping[str, Any]], session: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The last call of the session that the service or its engine failed, if the agent has called in vain since: a side call that was
    served later, such as a title, makes up for nothing. A recorded reply that was given to a fork does."""
    unserved, last = session.get("unserved"), find_last_call(calls)
    served_at = -inf if last is None else max(last["started_at"], session.get("replayed_at") or 0.0)
    return unserved if unserved is not None and served_at < unserved["at"] else None


def _ends_work(call: Mapping[str, Any]) -> bool:
    served = call["role"] == "main" and call["status"] == "finished" and call["delivered"]
    wants_tool = call["invalid_tool_call"] or (call["reply"] or {}).get("tool_calls")
    return served and call["finish_reason"] == "stop" and not wants_tool


def _count_bytes(text: str) -> int:
    return len(text.encode(errors="surrogatepass"))


def parse(data: Mapping[str, Any], name: str) -> Harness:
    """The harness that `data` defines; `name` unless it has its own. Raises `BadDefinition`."""
    data = {"name": name, "description": "", **data}
    known = [each.name for each in fields(Harness)]
    parsed: dict[str, Any] = {}
    problems: list[BadDefinition] = []
    if unknown := [repr(key) for key in data if key not in known]:
        problems.append(UnknownField(f"{name}: there is no field {' or '.join(unknown)} (known: {', '.join(known)})"))
    if "dialect" not in data:
        problems.append(BadDefinition(f"{name}: dialect is missing: chat, responses, messages, gemini, any, or an added one"))
    for key in data.keys() & set(known):
        try:
            parsed[key] = _parse_field(name, key, data[key])
        except BadDefinition as error:
            problems.append(error)
    if problems:
        raise type(problems[0])("; ".join(map(str, problems)))
    return Harness(**parsed)


def _parse_field(name: str, key: str, value: Any) -> Any:
    if key in ("argv", "version_argv", "install", "unset"):
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise BadDefinition(f"{name}: {key} must be a list of strings")
        return tuple(value)
    if key == "finished_exit_codes":
        if not isinstance(value, list) or not all(type(item) is int for item in value):
            raise BadDefinition(f"{name}: {key} must be a list of integers")
        return tuple(value)
    if key in ("env", "files"):
        if not isinstance(value, dict) or not all(isinstance(item, str) for item in value.values()):
            raise BadDefinition(f"{name}: {key} must be a table of strings")
        return value
    if key == "mcp":
        return parse_form(value)
    if key == "roles":
        return _parse_roles(name, value)
    if not isinstance(value, str):
        raise BadDefinition(f"{name}: {key} must be a string")
    return value


def _parse_roles(name: str, value: Any) -> tuple[RoleRule, ...]:
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadDefinition(f"{name}: roles must be a list of tables")
    try:
        return tuple(RoleRule(**item) for item in value)
    except (TypeError, ValueError, AttributeError) as error:
        known = ", ".join(each.name for each in fields(RoleRule))
        raise BadDefinition(f"{name}: roles: {error} (a rule has a role, and any of {known})") from error


NAME = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
"""Server names that every harness accepts."""


def check_accepted(harness: Harness, spec: HarnessSpec) -> None:
    """Raises `NotTaken` if the task has MCP servers or skills that the harness does not accept."""
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
