"""The output folder of a generation.

    generation.json        its id and settings
    rollouts.jsonl         every attempt that has ended, with its verdict
    accepted/              the kept sessions, an archive: Parquet, one row per trajectory (docs/store.md)
    chat.jsonl             the same rows as chat messages, and what an engine without token ids replied
    conversations.parquet  chat.jsonl as a table
    README.md              the data card, from which datasets.load_dataset knows the two tables
    logs/                  logs of the service and the node that --engine starts
    .verbatim/             their data

Files beside the archive are replaced atomically when the command ends, however it ends; the conversations are derived from the archive.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from cli.generation.attempts import Progress, input_id_of
from cli.refusal import CommandError
from proxy.archive.folder import ArchiveError, ArchiveReader, ArchiveWriter, write_whole
from proxy.archive.tables import ArchivedSession
from reconstruct.accounting import settle
from reconstruct.builders import CUT
from reconstruct.codec import decode
from reconstruct.messages import rename_calls
from reconstruct.records import MODEL, NO_TOKEN_IDS, Call, find_engine_id

Spell = Callable[[str, Sequence[int]], str | None]
ROW_COLUMNS = ["session_id", "trajectory_id", "call_ids", "reward", "role", "agent", "finish_reason", "truncated"]


class GenerationFolder:
    """Use in a `with` block, in which no other process can write to it. `id` is the generation's.

    Raises `CommandError` if the folder is not a generation's, or belongs to one with other `settings`."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self.path = path
        self.data, self.logs = path / ".verbatim", path / "logs"
        self._settings = dict(settings)
        self._writer = ArchiveWriter(path / "accepted")

    def __enter__(self) -> Self:
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            # The writer holds a lock: of two generations that start at once, only one may set the id.
            self._writer.__enter__()
            try:
                self.id = self._read_id()
                attempts = _read_lines(self.path / "rollouts.jsonl")
                self._attempts = {(line["task_id"], line["index"]): line for line in attempts}
                self._held = self._writer.known.list_ids()
            except BaseException:
                self._writer.__exit__(None, None, None)
                raise
        except OSError as error:
            raise CommandError(f"--out {self.path} cannot be used: {error.filename or self.path}: {error.strerror}") from error
        except (ArchiveError, ValueError, KeyError) as error:
            raise CommandError(f"--out {self.path} cannot be used: {error}") from error
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._writer.__exit__(kind, error, trace)

    def holds(self, session_id: str) -> bool:
        return session_id in self._held

    def keep(self, session: ArchivedSession, spell: Spell) -> None:
        """Add the session. `spell` gives the text of a policy's token ids, if anything does."""
        calls = {call_id: decode(record) for call_id, record in session.records}
        rows = [
            {
                **row,
                "text": spell(row["policy"], np.frombuffer(row["token_ids"], dtype="<i4").tolist()),
                "tools": _find_preamble(calls, row)[0].get("tools") or None,
            }
            for row in session.trajectories
        ]
        self._writer.add(replace(session, trajectories=rows))
        self._held.add(session.state["session_id"])
        if self._writer.full:
            self._writer.flush()

    def begin_anew(self) -> None:
        """Make the next run a new generation, with settings and tasks of its own. What is in the archive stays."""
        (self.path / "generation.json").unlink(missing_ok=True)

    def settle(self, progress: Sequence[Progress], *, complete: bool) -> tuple[int, Counter[str]]:
        """Write every file. Returns the number of conversations and, by finish reason, how many of them are truncated."""
        if complete:
            self._writer.finish({"generation": self.id, **self._settings})
        else:
            self._writer.flush()
        for line in (line for each in progress for line in each.lines()):
            key = line["task_id"], line["index"]
            # An interrupted run knows less than the run before it, and everything in the archive is kept.
            kept = self._attempts.get(key, line)["kept"] if line["kept"] is None else line["kept"]
            self._attempts[key] = {**line, "kept": self.holds(line["session_id"]) or kept}
        _write_lines(self.path / "rollouts.jsonl", self._attempts.values())
        truncated: Counter[str] = Counter()
        conversations = _write_lines(self.path / "chat.jsonl", self._make_conversations(truncated))
        write_conversations(self.path / "chat.jsonl", self.path / "conversations.parquet")
        tasks = {line["input"] for line in self._attempts.values()}
        counts = (len(tasks), len(self._attempts), sum(bool(line["kept"]) for line in self._attempts.values()))
        trajectories = sum(part["trajectories"] for part in self._writer.manifest["parts"])
        card = render_card(self._settings, *counts, conversations, truncated.total(), trajectories)
        write_whole(self.path / "README.md", lambda temporary: _write_text(temporary, card))
        return conversations, truncated

    def _make_conversations(self, truncated: Counter[str]) -> Iterator[dict[str, Any]]:
        if not self._writer.manifest["parts"]:
            return
        reader = ArchiveReader(self.path / "accepted")
        rows: dict[str, list[dict[str, Any]]] = {}
        for row in reader.rows("trajectories", ROW_COLUMNS):
            rows.setdefault(row["session_id"], []).append(row)
        for session in reader.sessions():
            state = session.state
            task = {"input": input_id_of(state["task_id"]), "task_id": state["task_id"], "metadata": state["metadata"]}
            calls = {call_id: decode(record) for call_id, record in session.records}
            for row in (*rows.get(state["session_id"], ()), *find_untold(session, calls)):
                truncated.update([row["finish_reason"]] if row["truncated"] else [])
                yield make_conversation(calls, row) | task

    def _read_id(self) -> str:
        """The generation's id, written first if the folder is new."""
        path = self.path / "generation.json"
        try:
            known = json.loads(path.read_text())
            settings, identity = known["settings"], str(known["id"])
        except FileNotFoundError:
            identity = uuid.uuid4().hex[:8]
            text = json.dumps({"id": identity, "settings": self._settings}, indent=1) + "\n"
            write_whole(path, lambda temporary: _write_text(temporary, text))
            return identity
        except (ValueError, KeyError, TypeError) as error:
            raise CommandError(f"{path} is not a generation's: {error}") from error
        for name, value in self._settings.items():
            if settings.get(name) != value:
                was = f"without {name}" if settings.get(name) is None else f"with {name} {settings[name]}"
                raise CommandError(f"{self.path} was started {was}: continue with that, or choose another --out", exit_code=2)
        return identity


def _read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _write_lines(path: Path, lines: Iterable[dict[str, Any]]) -> int:
    count = 0

    def write(temporary: Path) -> None:
        nonlocal count
        with temporary.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(json.dumps(line) + "\n")
                count += 1

    write_whole(path, write)
    return count


# Chat messages in the form that chat templates and training libraries take, not as the harness wrote them.


def make_conversation(calls: Mapping[str, Call], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as a line of chat.jsonl: the messages of its last call's request, that call's reply, and the tools, if any. Tool calls have
    the ids that the model saw."""
    preamble, path = _find_preamble(calls, row)
    # A call with `messages_from` records only the messages that it adds to its parent's.
    start = next((at for at, call in enumerate(path) if not call.messages_from), len(path) - 1)
    messages: list[dict[str, Any]] = []
    for call in reversed(path[: start + 1]):
        messages += [*json.loads(call.messages), json.loads(call.reply)]
    return {
        "messages": [simplify_message(rename_calls(message, partial(find_engine_id, calls))) for message in messages],
        # Not an empty list, for which some templates write a prompt about tools.
        "tools": preamble.get("tools") or None,
        "reward": row["reward"],
        "finish_reason": row["finish_reason"],
        "truncated": row["truncated"],
        "model": next((call.marks[MODEL] for call in path if MODEL in call.marks), preamble.get("model")),
        "role": row["role"],
        "agent": row["agent"],
        "session_id": row["session_id"],
        "trajectory_id": row["trajectory_id"],
    }


def find_untold(session: ArchivedSession, calls: Mapping[str, Call]) -> Iterator[dict[str, Any]]:
    """The ends of conversations of which the engine returned no token ids, so that there is no row of them, with as much of a row as
    `make_conversation` needs."""
    state = session.state
    settled = settle(calls.values(), delivered=session.delivered, session_id=state["session_id"])
    continued = {call.node.parent_id for call in calls.values() if call.messages_from}
    for call in settled.forest.in_order():
        if settled.refused.get(call.call_id) == NO_TOKEN_IDS and call.call_id not in continued:
            yield {
                "session_id": state["session_id"],
                "trajectory_id": None,
                "call_ids": [call.call_id],
                "reward": state["per_branch"].get(call.call_id, state["reward"]),
                "role": call.role,
                "agent": call.agent,
                "finish_reason": call.finish_reason,
                "truncated": call.finish_reason in CUT,
            }


def _find_preamble(calls: Mapping[str, Call], row: Mapping[str, Any]) -> tuple[dict[str, Any], list[Call]]:
    """The preamble of the row's root, and the calls from the row's last one to that root."""
    path = [calls[row["call_ids"][-1]]]
    while (parent_id := path[-1].node.parent_id) is not None:
        path.append(calls[parent_id])
    return json.loads(path[-1].preamble or b"{}"), path


CONVERSATION = {
    "messages": "list<json>",
    "tools": "list<json>",
    "reward": "float64",
    "finish_reason": "string",
    "truncated": "bool",
    "model": "string",
    "role": "string",
    "agent": "string",
    "session_id": "string",
    "trajectory_id": "string",
    "input": "string",
    "task_id": "string",
    "metadata": "json",
}
BATCH_LINES = 256


def write_conversations(chat: Path, path: Path) -> None:
    """The lines of `chat` as a Parquet table at `path`. Messages, tools and metadata are of Arrow's type for JSON, which datasets reads as
    objects: their fields differ from row to row. Without lines there is no table."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    spell = {"json": pa.json_(), "list<json>": pa.list_(pa.json_())}
    plain = {"json": pa.string(), "list<json>": pa.list_(pa.string())}
    stored, schema = (
        pa.schema([pa.field(name, types.get(kind) or pa.type_for_alias(kind)) for name, kind in CONVERSATION.items()])
        for types in (plain, spell)
    )

    def write(temporary: Path) -> None:
        with chat.open(encoding="utf-8") as lines, pq.ParquetWriter(temporary, schema, compression="zstd") as writer:
            while batch := list(islice(lines, BATCH_LINES)):
                made = map(json.loads, batch)
                rows = [{name: _as_column(line.get(name), kind) for name, kind in CONVERSATION.items()} for line in made]
                writer.write_table(pa.Table.from_pylist(rows, schema=stored).cast(schema))

    if chat.stat().st_size:
        write_whole(path, write)
    else:
        path.unlink(missing_ok=True)


def _as_column(value: Any, kind: str) -> Any:
    if kind == "json":
        return json.dumps(value)
    if kind == "list<json>" and value is not None:
        return [json.dumps(each) for each in value]
    return value


def simplify_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with its text as one string and tool arguments as objects.

    Many templates drop a list of parts, fail on a missing text, or double-encode arguments that are a string. Parts that are not text,
    and arguments that are not a JSON object, are unchanged."""
    made = {**message, "content": message.get("content") or ""}
    if isinstance(made["content"], list):
        texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else part for part in made["content"]]
        if all(isinstance(text, str) for text in texts):
            # As vLLM joins them for a template that wants text.
            made["content"] = "\n".join(texts)
    if made.get("tool_calls"):
        made["tool_calls"] = [_parse_arguments(call) for call in made["tool_calls"]]
    return made


def _parse_arguments(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function["arguments"])
    except (KeyError, TypeError, ValueError):
        return {**call}
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else {**call}


# The data card, README.md: what `datasets.load_dataset` reads of the folder, and what a person should know of it.


CONVERSATIONS = """- config_name: conversations
  data_files: conversations.parquet
  default: true
"""
TRAJECTORIES = """- config_name: trajectories
  data_files: accepted/trajectories-*.parquet
"""
CARD = """---
{configs}tags:
- verbatim
- agent-trajectories
---

# Attempts that passed

{count} of {attempts} attempts at {tasks} tasks were accepted and kept, as {conversations} conversations. {truncated} of these are
truncated: see the column `truncated`.

```python
from datasets import load_dataset

conversations = load_dataset(FOLDER, "conversations", split="train")  # messages and tools, for fine-tuning on text
trajectories = load_dataset(FOLDER, "trajectories", split="train")  # tokens exactly as sampled, with text beside them
```

- `conversations`, also as `chat.jsonl`: `messages` up to the last reply, `tools` (null without any), `reward`, `truncated`,
  `finish_reason`, ids. TRL and Axolotl take `messages` and `tools` as they are.
- `trajectories`: `token_ids`, `loss_mask` (1: sampled), `logprobs` of the engine, `weight_versions`, `text` (null if no engine
  could tell), `tools` as JSON, `reward`, `truncated`, ids. Rows of the two belong together by `trajectory_id`. A conversation without
  one is of an engine that returns no token ids: it has no trajectory.
- `rollouts.jsonl`: every attempt with its reward, whether it was kept, and why not.

| setting | |
|---|---|
{settings}"""


def render_card(
    settings: Mapping[str, Any], tasks: int, attempts: int, kept: int, conversations: int, truncated: int, trajectories: int
) -> str:
    rows = "".join(f"| `{name}` | {_cell(value)} |\n" for name, value in settings.items() if value is not None)
    # A configuration without files does not load.
    configs = (CONVERSATIONS if conversations else "") + (TRAJECTORIES if trajectories else "")
    return CARD.format(
        configs=f"configs:\n{configs}" if configs else "",
        count=kept,
        attempts=attempts,
        tasks=tasks,
        conversations=conversations,
        truncated=truncated,
        settings=rows,
    )


def _cell(value: Any) -> str:
    return "`" + str(value).replace("|", "\\|") + "`"
