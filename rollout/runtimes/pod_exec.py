"""One command in a pod over a websocket, by the exec protocol of Kubernetes (v4 and v5.channel.k8s.io): every message begins with the
number of its channel, 0 stdin, 1 stdout, 2 stderr, 3 the outcome as a `Status` object.

Runs in a thread, from `run` to its end; `abort` ends it from another.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from rollout.runtimes.base import RuntimeFailed
from rollout.runtimes.command import Sink
from rollout.runtimes.pod_scripts import ENDED

if TYPE_CHECKING:
    from kubernetes.stream.ws_client import WSClient

STDIN, STDOUT, STDERR, OUTCOME = 0, 1, 2, 3
_CHUNK_BYTES = 1 << 15
_PING_SECONDS = 20.0
"""After so long without a word the other side is asked for one: what lies between forgets connections on which nothing happens."""
_SILENT_PINGS = 3


class Lost(RuntimeFailed):
    """The connection broke off before the command's end was told."""


class Stream:
    """`payload` is the whole stdin. `failed` is called, in the thread, when `stdout` or `stderr` takes no more."""

    def __init__(
        self, connect: Callable[[], WSClient], payload: bytes, stdout: Sink, stderr: Sink, failed: Callable[[], None]
    ) -> None:
        self._connect = connect
        self._payload = payload
        self._sinks = {STDOUT: stdout, STDERR: stderr}
        self._failed = failed
        self._failure: RuntimeFailed | None = None
        self._lock = threading.Lock()
        self._client: WSClient | None = None
        self.aborted = False

    def run(self) -> int:
        """The exit code. Raises `Lost`, and `RuntimeFailed` when the command was not run or its output not taken."""
        client = self._connect()
        try:
            with self._lock:
                if self.aborted:
                    raise Lost("the connection was given up")
                self._client = client
            outcome = self._followed(client)
        finally:
            with self._lock:
                self._client = None
            with suppress(Exception):
                client.close()
        if self._failure is not None:
            raise self._failure
        return exit_code(outcome)

    def abort(self) -> None:
        with self._lock:
            self.aborted = True
            if self._client is not None:
                with suppress(OSError):
                    self._client.sock.sock.shutdown(socket.SHUT_RDWR)

    def _followed(self, client: WSClient) -> dict[str, Any]:
        from websocket import WebSocketException

        try:
            # What is sent to a command that has ended is lost, but its outcome is still to be read.
            with suppress(OSError, WebSocketException):
                for start in range(0, len(self._payload), _CHUNK_BYTES):
                    client.write_channel(STDIN, self._payload[start : start + _CHUNK_BYTES])
            client.sock.settimeout(_PING_SECONDS)
            return self._outcome(client)
        except (OSError, WebSocketException) as error:
            raise Lost(f"the connection to the command broke off: {error}") from error

    def _outcome(self, client: WSClient) -> dict[str, Any]:
        """Reads until it is told."""
        from websocket import ABNF, WebSocketTimeoutException

        silent = 0
        while True:
            try:
                kind, frame = client.sock.recv_data_frame(True)
            except WebSocketTimeoutException:
                silent += 1
                if silent > _SILENT_PINGS:
                    raise
                client.sock.ping()
                continue
            silent = 0
            if kind == ABNF.OPCODE_CLOSE:
                raise Lost("the connection to the command was closed before its end was told")
            if kind in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and len(frame.data) > 1:
                channel, data = frame.data[0], frame.data[1:]
                if channel == OUTCOME:
                    outcome: dict[str, Any] = json.loads(data)
                    return outcome
                self._fed(channel, data)

    def _fed(self, channel: int, data: bytes) -> None:
        if self._failure is not None or channel not in self._sinks:
            return
        try:
            self._sinks[channel].feed(data)
        except RuntimeFailed as error:
            self._failure = error
            self._failed()


class Answered:
    """A command's stdout as its shell in the pod passes it on: the first byte only says that the command was started, the last one that
    it has ended and that nothing of it is left."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = b""
        self.began = False

    @property
    def ended(self) -> bool:
        """Asked when nothing more comes."""
        return self._held == ENDED

    def feed(self, data: bytes) -> None:
        told, self.began = self.began, True
        data = self._held + (data if told else data[1:])
        # It is the last one only if none follows it.
        self._held = ENDED if data.endswith(ENDED) else b""
        if rest := data[: len(data) - len(self._held)]:
            self._sink.feed(rest)

    def kept(self) -> bytes:
        return self._sink.kept()


def exit_code(outcome: dict[str, Any]) -> int:
    """Of a `Status` as exec ends with. Raises `RuntimeFailed` when it tells of no command's end."""
    if outcome.get("status") == "Success":
        return 0
    causes = (outcome.get("details") or {}).get("causes") or ()
    for cause in causes:
        if outcome.get("reason") == "NonZeroExitCode" and cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise RuntimeFailed(f"the command was not run: {outcome.get('message') or outcome.get('reason') or outcome}")
