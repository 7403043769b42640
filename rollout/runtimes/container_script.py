"""How a command gets its environment in a container: a folder of the node is mounted there at `INSIDE`, in which the node writes a script
for each command that sets the variables, and that the shell which becomes the command reads and removes.

So values may hold anything and stand in no list of processes; a script that is still there says that the command never started, and one
that the node took away, that it never will.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from rollout.runtimes.base import DiskFull, RuntimeFailed, no_room
from rollout.runtimes.command import exports

INSIDE = "/run/verbatim"
_READER = 'exec 3<"$0" && rm "$0" && . /dev/fd/3 && exec 3<&- && exec "$@"'


def reader(script: Path) -> list[str]:
    """What reads the script in the container and becomes the words that follow."""
    return ["/bin/sh", "-c", _READER, f"{INSIDE}/{script.name}"]


def write(script: Path, env: Mapping[str, str], *lines: str, owner: int = 0) -> None:
    """`lines` are run before the variables are set; `owner` is the user of the container that reads it, 0 whose it is anyway. Raises
    `RuntimeFailed`, `CannotPass`."""
    text = "".join(f"{line}\n" for line in (*lines, *exports(env)))
    try:
        # The container's root may put anything into the folder: what is there already is not followed.
        descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(os.fsencode(text))
            if owner:
                os.fchown(descriptor, owner, owner)
    except OSError as error:
        raise (DiskFull if no_room(error) else RuntimeFailed)(f"{script} cannot be written: {error}") from error


def unread(script: Path) -> bool:
    """Whether it is still there. What else a command may have put in its place, or done to the folder, says nothing."""
    return os.path.isfile(script)


def take_away(script: Path) -> None:
    """Nobody reads it any more. What cannot be removed is none; it goes with the folder."""
    with suppress(OSError):
        script.unlink()
