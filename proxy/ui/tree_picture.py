"""TreePicture: a session's tree as boxes and lines. Time runs to the right, every branch has a line of its own.

Calls that each go on from the one before make a *stretch*. In a small tree every call is drawn; in a large one a stretch is one box.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from proxy.ui.call_lines import CallLine

EACH_CALL = 120
"""Calls up to which all are drawn; with more a stretch is one box."""
LONGEST = 48
"""The same for the longest way from a root to a leaf."""
MOST_STRETCHES = 300
STEP, LANE, RADIUS, MARGIN = 44, 38, 13, 22
WIDEST = 4
"""Steps that the box of a stretch is wide at most."""


@dataclass(frozen=True, slots=True)
class Box:
    """`first` and `last` are the calls in it, `count` how many. `mark` is why it begins a branch."""

    first: CallLine
    last: CallLine
    count: int
    x: int
    y: int
    width: int
    quarantined: int

    @property
    def label(self) -> str:
        return str(self.first.number) if self.count == 1 else f"{self.count} calls"

    @property
    def title(self) -> str:
        line = self.first
        what = f"call {line.number}" if self.count == 1 else f"calls {line.number} to {self.last.number}"
        parts = [what, line.role, line.branch_reason and f"branch: {line.branch_reason}"]
        parts.append(f"{line.prompt_tokens} + {line.sampled_tokens} tokens" if self.count == 1 else "")
        parts.append(f"{self.quarantined} quarantined" if self.quarantined and self.count > 1 else line.refused)
        return ", ".join(part for part in parts if part)


@dataclass(frozen=True, slots=True)
class TreePicture:
    """`left_out` calls are in none of the boxes."""

    boxes: Sequence[Box]
    lines: Sequence[str]
    width: int
    height: int
    left_out: int


def tree_picture(lines: Sequence[CallLine]) -> TreePicture:
    children = _children(lines)
    depth = _depth(lines)
    split = len(lines) <= EACH_CALL and depth <= LONGEST
    boxes: list[Box] = []
    drawn: list[str] = []
    left = [(line, 0, None) for line in reversed(children[""])]
    pending: list[tuple[CallLine, int, Box | None]] = list(left)
    lanes = 0
    while pending and len(boxes) < MOST_STRETCHES:
        line, column, parent = pending.pop()
        stretch = [line] if split else _stretch(line, children)
        # The first that goes on from a box stays on its lane; every other one gets a new lane.
        straight = parent is not None and not any(box.y == parent.y and box.x > parent.x for box in boxes)
        lane = (parent.y - MARGIN) // LANE if parent is not None and straight else lanes
        lanes = max(lanes, lane + 1)
        box = _box(stretch, column, lane)
        boxes.append(box)
        if parent is not None:
            drawn.append(_line(parent, box))
        after = column + (box.width + STEP - 1) // STEP
        pending += [(child, after, box) for child in reversed(children.get(stretch[-1].call_id, []))]
    width = max((box.x + box.width for box in boxes), default=0) + MARGIN
    return TreePicture(boxes, drawn, width, lanes * LANE + MARGIN // 2, len(lines) - sum(box.count for box in boxes))


def _children(lines: Sequence[CallLine]) -> dict[str, list[CallLine]]:
    """By parent, those that go straight on first. What has no parent here is a root, under ""."""
    known = {line.call_id for line in lines}
    found: dict[str, list[CallLine]] = {"": []}
    for line in lines:
        found.setdefault(line.parent_id if line.parent_id in known and line.parent_id else "", []).append(line)
    for each in found.values():
        each.sort(key=lambda line: (bool(line.branch_reason), line.number))
    return found


def _depth(lines: Sequence[CallLine]) -> int:
    depths: dict[str, int] = {}
    for line in lines:
        depths[line.call_id] = depths.get(line.parent_id or "", 0) + 1
    return max(depths.values(), default=0)


def _stretch(line: CallLine, children: dict[str, list[CallLine]]) -> list[CallLine]:
    """The call and those that go straight on from it, up to where the tree branches."""
    stretch = [line]
    while len(following := children.get(stretch[-1].call_id, [])) == 1 and not following[0].branch_reason:
        stretch.append(following[0])
    return stretch


def _box(stretch: Sequence[CallLine], column: int, lane: int) -> Box:
    steps = 1 if len(stretch) == 1 else min(WIDEST, 2 + len(stretch) // 25)
    width = 2 * RADIUS + (steps - 1) * STEP
    x, y = MARGIN + column * STEP, MARGIN + lane * LANE
    return Box(stretch[0], stretch[-1], len(stretch), x, y, width, sum(bool(line.refused) for line in stretch))


def _line(parent: Box, child: Box) -> str:
    """The path from the parent's right end to the child's left one."""
    x, end = parent.x + parent.width - RADIUS, child.x - RADIUS
    if parent.y == child.y:
        return f"M{x} {parent.y}H{end}"
    turn = min(x + RADIUS, end)
    return f"M{x} {parent.y}C{turn} {parent.y} {x} {child.y} {end} {child.y}"
