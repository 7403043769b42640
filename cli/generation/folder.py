"""The folder that a generation fills.

    generation.json  what it was begun with
    rollouts.jsonl   every attempt that has ended, with its verdict
    accepted/        the kept sessions, an archive: Parquet, one row per trajectory (docs/store.md)
    chat.jsonl       the same rows as chat messages
    logs/            what the service and the node of --engine said
    .verbatim/       their data

`rollouts.jsonl` and `chat.jsonl` are written when the command ends, however it ends: each is there whole. The second follows from the
archive.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cli.generation.attempts import Way, input_of
from cli.refusal import Refusal
from proxy.archive.folder import ArchiveError, ArchiveReader, ArchiveWriter, read_table, write_whole
from proxy.archive.tables import ArchivedSession
from reconstruct.codec import decode
from reconstruct.records import Call

SETTINGS, ROLLOUTS, ACCEPTED, CHAT, LOGS, DATA = (
    "generation.json",
    "rollouts.jsonl",
    "accepted",
    "chat.jsonl",
    "logs",
    ".verbatim",
)

_OF_A_ROW = ["session_id", "trajectory_id", "call_ids", "reward", "role", "agent", "finish_reason", "truncated"]


class GenerationFolder:
    """Used in a `with` block, in which no other process writes to it. `id` is the generation's own.

    Raises `Refusal` when it is another's, or was begun with other settings than `settings`."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self._settings = dict(settings)
        self._writer = ArchiveWriter(path / ACCEPTED)

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # First of all: of two that begin at once only one may say which generation it is.
            self._writer.__enter__()
            try:
                self._read()
            except BaseException:
                self._writer.__exit__(None, None, None)
                raise
        except OSError as error:
            raise Refusal(f"--out {self.path} cannot be used: {error.filename or self.path}: {error.strerror}") from error
        except (ArchiveError, ValueError, KeyError) as error:
            raise Refusal(f"--out {self.path} cannot be used: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, trace)

    def _read(self) -> None:
        self.id = self._begun()
        self._attempts = {(line["task_id"], line["index"]): line for line in _read_lines(self.path / ROLLOUTS)}
        self._held = {row["session_id"] for row in self._rows("sessions", ["session_id"])}

    @property
    def data(self) -> Path:
        return self.path / DATA

    @property
    def logs(self) -> Path:
        return self.path / LOGS

    def holds(self, session_id: str) -> bool:
        return session_id in self._held

    def keep(self, session: ArchivedSession) -> None:
        self._writer.add(session)
        self._held.add(session.state["session_id"])
        if self._writer.full:
            self._writer.flush()

    def settle(self, ways: Sequence[Way], *, complete: bool) -> tuple[int, Counter[str]]:
        """Writes every file as of now. Returns the number of conversations, and how many of them were truncated, by finish reason."""
        if complete:
            self._writer.finish({"generation": self.id, **self._settings})
        else:
            self._writer.flush()
        for line in (line for way in ways for line in way.lines()):
            key = line["task_id"], line["index"]
            # A run that was broken off early knows less than the one before it, and what is in the archive is kept.
            before = self._attempts.get(key, line)["kept"] if line["kept"] is None else line["kept"]
            self._attempts[key] = {**line, "kept": self.holds(line["session_id"]) or before}
        _write_lines(self.path / ROLLOUTS, iter(self._attempts.values()))
        truncated: Counter[str] = Counter()
        return _write_lines(self.path / CHAT, self._chat(truncated)), truncated

    def _chat(self, truncated: Counter[str]) -> Iterator[dict[str, Any]]:
        """The lines of `chat.jsonl`; counts in `truncated` those that were, by finish reason."""
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in self._rows("trajectories", _OF_A_ROW):
            rows.setdefault(row["session_id"], []).append(row)
        for session in ArchiveReader(self.path / ACCEPTED).sessions() if rows else ():
            state = session.state
            about = {"input": input_of(state["task_id"]), "task_id": state["task_id"], "metadata": state["metadata"]}
            for line in conversations(session.records, rows.get(state["session_id"], ())):
                truncated.update([line["finish_reason"]] if line["truncated"] else [])
                yield line | about

    def _rows(self, table: str, columns: list[str]) -> Iterator[dict[str, Any]]:
        """Those of the archive."""
        for part in self._writer.manifest["parts"]:
            if (entry := part["files"].get(table)) is not None:
                yield from read_table(self.path / ACCEPTED / entry["name"], table, columns)

    def _begun(self) -> str:
        """The generation's id, which is made when it begins."""
        path = self.path / SETTINGS
        try:
            known = json.loads(path.read_text())
            begun_with, identity = known["settings"], str(known["id"])
        except FileNotFoundError:
            identity = uuid.uuid4().hex[:8]
            text = json.dumps({"id": identity, "settings": self._settings}, indent=1) + "\n"
            write_whole(path, lambda temporary: _write_text(temporary, text))
            return identity
        except (ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{path} is not what a generation writes there: {error}") from error
        for name, value in self._settings.items():
            if begun_with.get(name) != value:
                was = "without it" if begun_with.get(name) is None else f"with {begun_with[name]}"
                raise Refusal(f"{self.path} was begun {was} for {name}: go on with that, or choose another --out", exit_code=2)
        return identity


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _write_lines(path: Path, lines: Iterator[dict[str, Any]]) -> int:
    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        with temporary.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
                count += 1

    write_whole(path, write)
    return count


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


# Sessions as chat messages, one conversation per training row: in the form that chat templates and training libraries take, not as the
# harness wrote them. Text is one string, the arguments of a tool call are an object.


def conversations(records: Sequence[tuple[str, bytes]], rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """One per row: the messages of its last call's request, then that call's reply; and its tools, where it was given some."""
    calls = {call_id: decode(record) for call_id, record in records}
    for row in rows:
        last = calls[row["call_ids"][-1]]
        preamble = json.loads(_root(calls, last).preamble or b"{}")
        yield {
            "messages": messages_of(calls, last),
            **({"tools": preamble["tools"]} if preamble.get("tools") else {}),
            "reward": row["reward"],
            "finish_reason": row["finish_reason"],
            "truncated": row["truncated"],
            "model": preamble.get("model"),
            "role": row["role"],
            "agent": row["agent"],
            "session_id": row["session_id"],
            "trajectory_id": row["trajectory_id"],
        }


def messages_of(calls: Mapping[str, Call], last: Call) -> list[dict[str, Any]]:
    """Every message of the call's request, then its reply, as templates take them."""
    lineage = [last]
    while lineage[-1].messages_from and lineage[-1].node.parent_id is not None:
        lineage.append(calls[lineage[-1].node.parent_id])
    made: list[dict[str, Any]] = []
    for call in reversed(lineage):
        made += [*json.loads(call.messages), json.loads(call.reply)]
    return [plain(message) for message in made]


def plain(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message as templates take it. Many of them show nothing of a list of parts, break where there is no text at all, or write
    arguments that are text as a string within a string. What is not text among the parts, and arguments that are no JSON object, stay
    as they are."""
    made = {**message, "content": message.get("content") or ""}
    if isinstance(made["content"], list):
        made["content"] = _text(made["content"])
    if made.get("tool_calls"):
        made["tool_calls"] = [_with_arguments(call) for call in made["tool_calls"]]
    return made


def _text(parts: list[Any]) -> Any:
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in parts]
    # As vLLM joins them for a template that wants text.
    return "\n".join(texts) if all(isinstance(text, str) for text in texts) else parts


def _with_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return {**call}
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else {**call}


def _root(calls: Mapping[str, Call], call: Call) -> Call:
    while call.node.parent_id is not None:
        call = calls[call.node.parent_id]
    return call
