"""The demo's live picture: phases with their seconds, and the last steps with reward, speed and weight versions.

On a terminal it is redrawn in place; elsewhere (a log file, CI) every event is one line.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

SHOWN = 12
BAR = 24


@dataclass(slots=True)
class Phase:
    """`share` of it is done, where that is known."""

    title: str
    started: float
    seconds: float | None = None
    share: float | None = None
    detail: str = ""

    def reached(self, done: int, of: int, what: str) -> None:
        self.share = done / max(1, of)
        self.detail = f"{done:,} of {of:,} {what}"


class Screen:
    """`phase` marks what is going on, `sampled` and `trained` report a step from the driver and from the trainer."""

    def __init__(self, console: Console, steps: int) -> None:
        self._console = console
        self._phases: list[Phase] = []
        self._steps: dict[int, dict[str, Any]] = {}
        self._count = steps
        self._live = Live(get_renderable=self._picture, console=console, refresh_per_second=4)

    def __enter__(self) -> Screen:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    @contextlib.contextmanager
    def phase(self, title: str) -> Iterator[Phase]:
        phase = Phase(title, time.monotonic())
        self._phases.append(phase)
        self._line(f"{title} …")
        yield phase
        phase.seconds = time.monotonic() - phase.started
        self._line(f"{title}: done in {phase.seconds:.1f} s {phase.detail}".rstrip())

    def sampled(self, step: int, *, reward: float, tokens: int, seconds: float) -> None:
        self._steps.setdefault(step, {}).update(reward=reward, speed=tokens / seconds, seconds=seconds)
        self._line(f"step {step}/{self._count}: reward {reward:.3f}, {tokens / seconds:,.0f} tokens/s, {seconds:.1f} s")

    def trained(self, line: Mapping[str, Any]) -> None:
        pushed = f"v{line['step']} in {line['push_seconds']:.2f} s" if "push_seconds" in line else "off"
        known = {"trained": line["train_seconds"], "pushed": pushed, "staleness": max(line["ages"])}
        step = self._steps.setdefault(line["step"], {})
        step.update(known)
        # Without rounds nobody else tells a step's reward.
        step.setdefault("reward", line["reward"])
        learned = f"trained on reward {line['reward']:.3f} in {line['train_seconds']:.1f} s"
        self._line(f"step {line['step']}/{self._count}: {learned}, weights pushed: {pushed}")

    def _line(self, text: str) -> None:
        if not self._console.is_terminal:
            self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def _picture(self) -> Group:
        phases = Table.grid(padding=(0, 1))
        for phase in self._phases:
            seconds = phase.seconds if phase.seconds is not None else time.monotonic() - phase.started
            sign = Text("✓", style="green") if phase.seconds is not None else Spinner("dots", style="cyan")
            bar = "" if phase.share is None or phase.seconds is not None else _bar(phase.share)
            phases.add_row(sign, phase.title, Text(f"{seconds:6.1f} s", style="dim"), bar, Text(phase.detail, style="dim"))
        return Group(phases, self._step_table()) if self._steps else Group(phases)

    def _step_table(self) -> Table:
        table = Table(title=f"step {max(self._steps)} of {self._count}", title_justify="left", header_style="bold")
        for name in ("step", "reward", "tokens/s", "sampling", "staleness", "training", "weights pushed"):
            table.add_column(name, justify="left" if name == "reward" else "right")
        for step in sorted(self._steps)[-SHOWN:]:
            known = self._steps[step]
            table.add_row(
                str(step),
                _bar(known["reward"]).append(f" {known['reward']:.3f}", style="bold") if "reward" in known else "",
                f"{known['speed']:,.0f}" if "speed" in known else "",
                f"{known['seconds']:.1f} s" if "seconds" in known else "",
                str(known.get("staleness", "")),
                f"{known['trained']:.1f} s" if "trained" in known else "",
                known.get("pushed", ""),
            )
        return table


def _bar(share: float) -> Text:
    filled = round(max(0.0, min(1.0, share)) * BAR)
    return Text("█" * filled, style="blue").append("·" * (BAR - filled), style="dim")
