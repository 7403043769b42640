"""`verbatim runs export`: the numbers of a run, a step per weight version, by the writers of TensorBoard and of Weights & Biases.

The numbers of a version change as long as sessions of it close. Event files are revised: TensorBoard drops what a restart repeats. W&B
takes no step twice, so a version goes there once two newer ones have rollouts, or the run is over. Whoever starts again continues.
"""

from __future__ import annotations

import re
import struct
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import quote

from cli.refusal import CommandError

if TYPE_CHECKING:
    from cli.control import CommandClient

POLL_SECONDS = 30.0
HELD_BACK = 2
"""Newest versions that W&B does not get yet."""
NO_NUMBERS = {"run", "policy", "label", "start", "quarantined", "rollouts_per_hour", "tokens_per_second"}
EVENT_FILES = "events.out.tfevents.*"

Row = Mapping[str, float]
"""Numbers by name."""


class Curves(Protocol):
    """Where the curves of one policy of a run go."""

    def write(self, rows: Mapping[int, Row], *, is_over: bool) -> None:
        """`rows` by weight version: all that the service has."""

    def close(self) -> None: ...


Opening = Callable[[Mapping[str, Any], str], Curves]
"""Of a run as `GET /runs/{run}` has it, and a policy."""


def export_curves(
    control: CommandClient, run: str, openings: Sequence[Opening], *, follow: bool, pause: Callable[[float], bool]
) -> None:
    """Writes what there is; with `follow` until the run is declared over or `pause`, given seconds, says to stop."""
    opened: dict[tuple[str, int], Curves] = {}
    try:
        while True:
            record = control.get(f"/runs/{quote(run, safe='')}")
            is_over = record["ended_at"] is not None
            for policy, rows in split_policies(control.get("/run", run=run, axis="version")["points"]).items():
                for at, opening in enumerate(openings):
                    if (policy, at) not in opened:
                        opened[policy, at] = opening(record, policy)
                    opened[policy, at].write(rows, is_over=is_over)
            if is_over or not follow or pause(POLL_SECONDS):
                return
    finally:
        for curves in opened.values():
            curves.close()


def split_policies(points: Iterable[Mapping[str, Any]]) -> dict[str, dict[int, Row]]:
    """The rows of `GET /run` by policy and version."""
    found: dict[str, dict[int, Row]] = {}
    for point in points:
        row = {name: float(value) for name, value in point.items() if name not in NO_NUMBERS and value is not None}
        row |= {f"quarantined_tokens/{reason}": float(lost["tokens"]) for reason, lost in point["quarantined"].items()}
        found.setdefault(point["policy"], {})[point["start"]] = {f"verbatim/{name}": row[name] for name in sorted(row)}
    return found


class EventFiles:
    """TensorBoard event files in DIR/RUN, of another policy than the default one in DIR/RUN/POLICY."""

    def __init__(self, folder: Path, record: Mapping[str, Any], policy: str) -> None:
        self._folder = folder / _as_name(record["run"]) / _as_name(policy)
        self._written = self._read()
        self._writer: Any = None

    def write(self, rows: Mapping[int, Row], *, is_over: bool) -> None:
        """From the first version on that is new or has changed, all are written anew, behind the event by which TensorBoard drops those
        that it had."""
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary

        rounded = {version: {tag: _round(value) for tag, value in row.items()} for version, row in rows.items()}
        changed = [version for version, row in rounded.items() if self._written.get(version) != row]
        if not changed:
            return
        writer, now = self._open(), time.time()
        first = min(changed)
        if any(version >= first for version in self._written):
            writer.add_event(Event(wall_time=now, step=first, session_log=SessionLog(status=SessionLog.START)))
        for version in sorted(each for each in rounded if each >= first):
            values = [Summary.Value(tag=tag, simple_value=value) for tag, value in rounded[version].items()]
            writer.add_event(Event(wall_time=now, step=version, summary=Summary(value=values)))
        writer.flush()
        self._written = {version: row for version, row in self._written.items() if version < first} | rounded

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _read(self) -> dict[int, dict[str, float]]:
        """What the folder's event files show. Raises `CommandError` if they are not of this command."""
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        if not [*self._folder.glob(EVENT_FILES)]:
            return {}
        read = EventAccumulator(str(self._folder), size_guidance={"scalars": 0}).Reload()
        found: dict[int, dict[str, float]] = {}
        tags = {kind: named for kind, named in read.Tags().items() if isinstance(named, list)}
        for kind, tag in ((kind, tag) for kind, named in tags.items() for tag in named):
            if kind != "scalars" or not tag.startswith("verbatim/"):
                raise CommandError(f"{self._folder} has event files of something else ({tag}): choose another folder")
            for event in read.Scalars(tag):
                found.setdefault(event.step, {})[tag] = event.value
        return found

    def _open(self) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            # TensorBoard reads the files of a folder by name, which begins with the second: this one has to be the last.
            names = [each.name.split(".")[3] for each in self._folder.glob(EVENT_FILES)]
            while names and time.time() < int(max(names)) + 1:
                time.sleep(0.05)
            try:
                self._writer = EventFileWriter(str(self._folder))
            except OSError as error:
                raise CommandError(f"{self._folder} cannot be written: {error}") from error
        return self._writer


class WandbRun:
    """A run of W&B in PROJECT, named and grouped as the run, of another policy than the default one with its name behind.

    The steps that it has are known by W&B itself where that is online, otherwise from a file beside the offline data.
    """

    def __init__(self, project: str, record: Mapping[str, Any], policy: str) -> None:
        import wandb

        entity, _, name = project.rpartition("/")
        self._id = f"{_as_name(record['run'])}-{_as_name(policy) or 'default'}-{record['since']:.0f}"
        settings = wandb.Settings(console="off", x_disable_stats=True, disable_git=True, save_code=False)
        try:
            self._run = wandb.init(
                entity=entity or None,
                project=name,
                id=self._id,
                name=" ".join(filter(None, (record["run"], policy))),
                group=record["run"],
                resume="allow",
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            said = str(error).rstrip(".")
            raise CommandError(f"W&B does not take the run: {said}; WANDB_MODE=offline writes files instead") from error
        kept = self._kept.read_text() if self._run.offline and self._kept.exists() else "0"
        self._next = max(self._run.starting_step, int(kept))

    @property
    def _kept(self) -> Path:
        return Path(self._run.settings.wandb_dir) / f"verbatim-{self._id}.step"

    def write(self, rows: Mapping[int, Row], *, is_over: bool) -> None:
        versions = sorted(rows)
        for version in versions if is_over else versions[:-HELD_BACK]:
            if version >= self._next:
                self._run.log(dict(rows[version]), step=version)
                self._next = version + 1

    def close(self) -> None:
        self._run.finish()
        if self._run.offline:
            # Only now are the steps on the disk: a repeated one harms nothing, a missing one would.
            self._kept.write_text(str(self._next))


def _as_name(name: str) -> str:
    """As a folder and a part of an id."""
    return re.sub(r"[^A-Za-z0-9._-]", "_", name)


def _round(value: float) -> float:
    """As event files keep it, in four bytes."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded
