"""A session that a subcommand opens for a harness, from its creation to its close."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from cli.control import TIMEOUT_SECONDS, Control, HeldBack
from cli.refusal import Refusal
from cli.sessions import accounting_line, rows_by_role
from cli.stop_signals import StopSignals
from reconstruct.roles import rule_as_wire
from rollout.harnesses.catalogue import load
from rollout.harnesses.definition import Harness
from rollout.harnesses.errors import HarnessError
from rollout.harnesses.prepared import Endpoint

CLOSE_TRIES = 3
MOST_ERROR_CHARACTERS = 4000


def chosen(name_or_path: str) -> Harness:
    """The definition of that name or path. Raises `Refusal` (exit code 2)."""
    try:
        return load(name_or_path)
    except HarnessError as error:
        raise Refusal(str(error), exit_code=2) from error


def open_session(control: Control, definition: Harness, **fields: Any) -> OpenedSession:
    """A new session for that harness; fields that are None are left out. Raises `Refusal`."""
    fields |= {"metadata": {"harness": definition.name}}
    # A service of an earlier build does not know them.
    fields |= {"role_rules": [rule_as_wire(rule) for rule in definition.roles]} if definition.roles else {}
    created = control.post("/sessions", {name: value for name, value in fields.items() if value is not None})
    return OpenedSession(control, created["session_id"], Endpoint(created["base_urls"], created["api_key"]))


def open_when_let_in(
    control: Control, stop: StopSignals, show: Callable[[str], object], definition: Harness, **fields: Any
) -> OpenedSession:
    """As `open_session`, and asks again while the service holds new sessions back, which it lets `show` say.

    Raises `Refusal`, when it is stopped while it waits with the signal's exit code."""
    while True:
        try:
            return open_session(control, definition, **fields)
        except HeldBack as held:
            show(f"waiting until the service takes a new session: {held}")
            if stop.wait(held.retry_after_seconds):
                raise Refusal("stopped while it waited: no session was opened", exit_code=128 + (stop.number or 0)) from None


@dataclass(frozen=True, slots=True)
class OpenedSession:
    control: Control
    session_id: str
    endpoint: Endpoint

    @property
    def path(self) -> str:
        return f"/sessions/{quote(self.session_id, safe='')}"

    def first_model(self) -> str:
        """The first model that the session's own model list names. Raises `Refusal`."""
        url = self.endpoint.base_urls["openai"] + "/models"
        try:
            answer = httpx.get(url, headers={"Authorization": f"Bearer {self.endpoint.api_key}"}, timeout=TIMEOUT_SECONDS)
            return str(answer.raise_for_status().json()["data"][0]["id"])
        except IndexError as error:
            raise Refusal(f"{url} names no model: no engine is up; wait for one or pass --model") from error
        except (httpx.HTTPError, httpx.InvalidURL, ValueError, KeyError, TypeError) as error:
            raise Refusal(f"{url} did not name the models ({error}): pass --model") from error

    def close(self, status: str, *, error: str | None = None, reward: float | None = None) -> None:
        """Freeze the session; tried again when the service cannot take it at once. Raises `Refusal`."""
        body: dict[str, Any] = {"status": status}
        if error is not None:
            body["error"] = error[:MOST_ERROR_CHARACTERS]
        if reward is not None:
            body["reward"] = reward
        for left in reversed(range(CLOSE_TRIES)):
            try:
                self.control.post(f"{self.path}/close", body)
                return
            except Refusal as refusal:
                if not left:
                    raise Refusal(f"session {self.session_id} could not be closed as {status}: {refusal}") from refusal
                time.sleep(1)

    def has_calls(self) -> bool:
        """Whether a call of it was recorded. Raises `Refusal`."""
        return bool(self.control.get(self.path)["calls"])

    def summary(self, status: str | None = None) -> list[str]:
        """A line with how it ended (`status`, or else as what it was closed), its calls, and where its sampled tokens went, and one with
        its rows by role. Raises `Refusal`."""
        session = self.control.get(self.path)
        exported = self.control.get(f"{self.path}/trajectories")
        rows = exported["trajectories"]
        line = accounting_line(len(rows), exported["accounting"])
        told = [f"session {self.session_id} {status or session['status']}: {session['calls']} calls, {line}"]
        return [*told, f"rows: {rows_by_role(rows)}"] if rows else told
