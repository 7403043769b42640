"""What the cluster says of a pod, from its status as the API gives it (JSON)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_HOPELESS = (
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ImageInspectError",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
)
"""Reasons for which a container waits that do not pass on their own. ErrImagePull is tried again, and then is ImagePullBackOff."""

Pod = Mapping[str, Any]


def runs(pod: Pod) -> bool:
    """Whether commands can be started in it."""
    states = [each.get("state", {}) for each in _status(pod).get("containerStatuses") or ()]
    return _status(pod).get("phase") == "Running" and bool(states) and all("running" in state for state in states)


def ended(pod: Pod) -> str | None:
    """Why it does not run any more; None while it does, or has not begun to."""
    status = _status(pod)
    for each in status.get("containerStatuses") or ():
        if (gone := each.get("state", {}).get("terminated")) is not None:
            own = _words(status)
            return own or _words(gone) or f"its first process ended with exit code {gone.get('exitCode')}"
    if status.get("phase") in ("Failed", "Succeeded"):
        return _words(status) or f"it has {status['phase'].lower()}"
    return None


def out_of_memory(pod: Pod) -> bool:
    """Whether the kernel ended its container for the memory it took."""
    states = [each.get("state", {}) for each in _status(pod).get("containerStatuses") or ()]
    return any(state.get("terminated", {}).get("reason") == "OOMKilled" for state in states)


def evicted(pod: Pod) -> bool:
    """Whether the machine it was on took it away, for the disk space it used among others."""
    return _status(pod).get("reason") == "Evicted"


def hopeless(pod: Pod) -> str | None:
    """Why it will never run, where that is known already."""
    for each in _status(pod).get("containerStatuses") or ():
        waiting = each.get("state", {}).get("waiting") or {}
        if waiting.get("reason") in _HOPELESS:
            return _words(waiting)
    return ended(pod)


def waits_for(pod: Pod) -> str:
    """What it waits for, for who has waited long enough."""
    status = _status(pod)
    for each in status.get("containerStatuses") or ():
        if words := _words(each.get("state", {}).get("waiting") or {}):
            return words
    for each in status.get("conditions") or ():
        if each.get("status") == "False" and (words := _words(each)):
            return words
    return f"it is {status.get('phase', 'unknown')}"


def _status(pod: Pod) -> Mapping[str, Any]:
    return pod.get("status") or {}


def _words(said: Mapping[str, Any]) -> str:
    return ": ".join(word for word in (said.get("reason"), said.get("message")) if word)
