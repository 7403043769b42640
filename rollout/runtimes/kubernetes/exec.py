"""One command in a pod, from its start to the end of all it started: a connection of its own (`pod_exec`) to a shell in the pod that reads
it from there, runs it and ends what it leaves (`pod_scripts`). A second connection sends it signals."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import uuid
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from rollout.runtimes.base import DiskFull, Executed, RuntimeFailed
from rollout.runtimes.command import Limits, Output, Sink, followed
from rollout.runtimes.files import is_full
from rollout.runtimes.kubernetes import cluster, manifest
from rollout.runtimes.kubernetes.cluster import Cluster, Pod, in_thread
from rollout.runtimes.kubernetes.manifest import ENDED, INSIDE

if TYPE_CHECKING:
    from kubernetes.stream.ws_client import WSClient


_STREAM_SECONDS = 10.0
"""What a connection has to end in after its command was killed."""
_STATUS_SECONDS = 30.0
"""What the cluster has to say why a pod ended."""
_KEPT_BYTES = 1 << 16


class PodCommand:
    """`pod` is the name of it."""

    def __init__(self, cluster: Cluster, pod: str) -> None:
        self._cluster = cluster
        self._pod = pod
        self.identity = uuid.uuid4().hex
        self._stream: Stream | None = None
        self._told = False
        """Whether its end was told, with which nothing of it is left."""
        self._killed = False
        self._signals: set[asyncio.Task[None]] = set()

    async def executed(self, script: bytes, stdin: bytes, limits: Limits) -> Executed:
        """Raises `RuntimeFailed`, `DiskFull`."""
        answered: list[Answered] = []

        async def follow(stdout: Sink, stderr: Sink) -> int:
            answered.append(Answered(stdout))
            return await self._followed(script, stdin, answered[0], stderr)

        try:
            done = await followed(follow, limits, self._send)
        finally:
            await asyncio.gather(*self._signals, return_exceptions=True)
        if not answered[0].began and not self._killed and done.exit_code != 137:
            told = done.stderr.decode(errors="replace").strip() or f"exit code {done.exit_code}"
            raise (DiskFull if is_full(done.stderr) else RuntimeFailed)(f"the command was not started in {self._pod}: {told}")
        return done

    async def _followed(self, script: bytes, stdin: bytes, stdout: Answered, stderr: Sink) -> int:
        loop = asyncio.get_running_loop()
        sizes = (str(len(script)), str(len(script) + len(stdin)))
        argv = ["/bin/sh", "-c", manifest.RUN, INSIDE, self.identity, *sizes]
        connect = partial(self._cluster.connected, self._pod, argv, True)

        def kill() -> None:
            loop.call_soon_threadsafe(self._send, signal.SIGKILL)

        self._stream = Stream(connect, script + stdin, stdout, stderr, kill)
        try:
            code = await in_thread(self._stream.run)
        except Lost as error:
            if self._killed:
                return 128 + signal.SIGKILL
            return await self._code_with_pod(error)
        if not (stdout.ended or self._killed) and (stdout.began or code == 128 + signal.SIGKILL):
            return await self._code_of_torn(code, stdout.began)
        self._told = True
        return code

    async def _code_of_torn(self, code: int, began: bool) -> int:
        """Of a command whose shell was killed: with the whole pod, or by the command."""
        try:
            return await self._code_with_pod(Lost("its shell was killed"))
        except Lost:
            if not began:
                raise
            self._send(signal.SIGKILL)
            return code

    async def _code_with_pod(self, error: Lost) -> int:
        """The end of a command with its pod. Raises what became of that, or `error` when it still runs."""
        why = await self._cluster.until(self._pod, _end_of, _STATUS_SECONDS)
        if why is None:
            raise error
        self._told = True
        pod = await self._cluster.pod(self._pod)
        if pod is not None and cluster.out_of_memory(pod):
            return 128 + signal.SIGKILL
        refused = DiskFull if pod is not None and cluster.evicted(pod) and "storage" in why else RuntimeFailed
        raise refused(f"the pod {self._pod} has ended: {why}") from error

    def _send(self, number: int) -> None:
        if self._told or self._stream is None:
            return
        self._killed = True
        task = asyncio.ensure_future(self._signalled("KILL" if number == signal.SIGKILL else "TERM", self._stream))
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    async def _signalled(self, name: str, stream: Stream) -> None:
        """Raises nothing: what cannot be reached is given up, and goes with its pod."""
        argv = ["/bin/sh", "-c", manifest.KILL, INSIDE, self.identity, name]
        with Output(_KEPT_BYTES) as stdout, Output(_KEPT_BYTES) as stderr:
            sent = Stream(partial(self._cluster.connected, self._pod, argv, False), b"", stdout, stderr, lambda: None)
            loop = asyncio.get_running_loop()
            loop.call_later(_STREAM_SECONDS, sent.abort)
            if name == "KILL":
                loop.call_later(_STREAM_SECONDS, stream.abort)
            await asyncio.gather(in_thread(sent.run), return_exceptions=True)


def _end_of(pod: Pod | None) -> str | None:
    return "somebody removed it" if pod is None else cluster.ended(pod)


# One command in a pod over a websocket, by the exec protocol of Kubernetes (v4 and v5.channel.k8s.io): every message begins with the
# number of its channel, 0 stdin, 1 stdout, 2 stderr, 3 the outcome as a `Status` object.
#
# Runs in a thread, from `run` to its end; `abort` ends it from another.


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
