"""One command in a pod, from its start to the end of everything it started.

One websocket connects to a shell in the pod that receives the command, runs it and ends what it leaves (`manifest.RUN`); each signal takes
a connection of its own (`manifest.KILL`). Every message of the exec protocol (v4 and v5.channel.k8s.io) starts with its channel number:
0 stdin, 1 stdout, 2 stderr, 3 the outcome as a `Status` object.
"""

from __future__ import annotations

import asyncio
import json
import signal
import uuid
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from aiohttp import ClientError, ClientWebSocketResponse, WSMsgType

from rollout.runtimes.base import DiskFull, Executed, RuntimeFailed
from rollout.runtimes.command import ExecLimits, Sink, run_bounded
from rollout.runtimes.files import is_disk_full_message
from rollout.runtimes.kubernetes import cluster, manifest
from rollout.runtimes.kubernetes.cluster import Pod, PodApi
from rollout.runtimes.kubernetes.manifest import ENDED, INSIDE

STDIN, STDOUT, STDERR, OUTCOME = 0, 1, 2, 3
_CHUNK_BYTES = 1 << 15
_STREAM_SECONDS = 10.0
"""How long a connection may outlive the SIGKILL of its command."""
_STATUS_SECONDS = 30.0
"""How long the cluster may take to say why a pod ended."""


class Lost(RuntimeFailed):
    """The connection ended before it reported the end of the command."""


class PodCommand:
    """`pod` is the pod's name. `identity` marks the command's processes."""

    def __init__(self, cluster: PodApi, pod: str) -> None:
        self._cluster = cluster
        self._pod = pod
        self.identity = uuid.uuid4().hex
        self._connection = asyncio.timeout(None)
        self._ended = False
        """Whether its end was reported; nothing of it is left then."""
        self._killed = False
        self._signals: set[asyncio.Task[None]] = set()

    async def run(self, script: bytes, stdin: bytes, limits: ExecLimits) -> Executed:
        """Raises `RuntimeFailed`, `DiskFull`."""
        outputs: list[ShellOutput] = []

        async def follow(stdout: Sink, stderr: Sink) -> int:
            outputs.append(ShellOutput(stdout))
            return await self._follow(script, stdin, outputs[0], stderr)

        try:
            done = await run_bounded(follow, limits, self._send)
        finally:
            await asyncio.gather(*self._signals, return_exceptions=True)
        if not outputs[0].has_begun and not self._killed and done.exit_code != 137:
            failure = DiskFull if is_disk_full_message(done.stderr) else RuntimeFailed
            raise failure(f"the command did not start in the pod {self._pod}: {done.explain_failure()}")
        return done

    async def _follow(self, script: bytes, stdin: bytes, stdout: ShellOutput, stderr: Sink) -> int:
        sizes = (str(len(script)), str(len(script) + len(stdin)))
        argv = ["/bin/sh", "-c", manifest.RUN, INSIDE, self.identity, *sizes]
        try:
            async with self._connection:
                code = await self._exchange(argv, script + stdin, {STDOUT: stdout, STDERR: stderr})
        except TimeoutError:
            # Only SIGKILL sets a deadline.
            return 128 + signal.SIGKILL
        except Lost as error:
            return 128 + signal.SIGKILL if self._killed else await self._find_code_of_pod(error)
        if not (stdout.has_ended or self._killed) and (stdout.has_begun or code == 128 + signal.SIGKILL):
            return await self._find_code_without_shell(code, stdout.has_begun)
        self._ended = True
        return code

    async def _exchange(self, argv: list[str], payload: bytes, sinks: Mapping[int, Sink]) -> int:
        """Runs argv in the pod; its exit code. Raises `Lost`, and `RuntimeFailed` if argv did not run or a sink refused its output."""
        async with self._cluster.connect(self._pod, argv, stdin=bool(payload)) as socket:
            sending = asyncio.ensure_future(_send_payload(socket, payload))
            try:
                return await self._receive(socket, sinks)
            finally:
                sending.cancel()
                await asyncio.gather(sending, return_exceptions=True)

    async def _receive(self, socket: ClientWebSocketResponse, sinks: Mapping[int, Sink]) -> int:
        failure: RuntimeFailed | None = None
        async for message in socket:
            if message.type not in (WSMsgType.BINARY, WSMsgType.TEXT) or len(message.data) < 2:
                continue
            data = message.data.encode() if isinstance(message.data, str) else message.data
            if data[0] == OUTCOME:
                if failure is not None:
                    raise failure
                return parse_exit_code(json.loads(data[1:]))
            if data[0] in sinks and failure is None:
                try:
                    sinks[data[0]].feed(data[1:])
                except RuntimeFailed as error:
                    failure = error
                    self._send(signal.SIGKILL)
        raise failure or Lost("the connection to the command closed before the end of the command was reported")

    async def _find_code_without_shell(self, code: int, has_begun: bool) -> int:
        """The exit code of a command whose shell was killed: with the whole pod, or by the command itself."""
        try:
            return await self._find_code_of_pod(Lost("the shell of the command was killed"))
        except Lost:
            if not has_begun:
                raise
            self._send(signal.SIGKILL)
            return code

    async def _find_code_of_pod(self, error: Lost) -> int:
        """The exit code of a command that ended with its pod. Raises why the pod ended, or `error` if it still runs."""
        reason = await self._cluster.wait_for_pod(self._pod, _find_end, _STATUS_SECONDS)
        if reason is None:
            raise error
        self._ended = True
        pod = await self._cluster.read_pod(self._pod)
        if pod is not None and cluster.is_out_of_memory(pod):
            return 128 + signal.SIGKILL
        failure = DiskFull if pod is not None and cluster.is_evicted(pod) and "storage" in reason else RuntimeFailed
        raise failure(f"the pod {self._pod} has ended: {reason}") from error

    def _send(self, number: int) -> None:
        if self._ended:
            return
        self._killed = True
        task = asyncio.ensure_future(self._signal("KILL" if number == signal.SIGKILL else "TERM"))
        self._signals.add(task)
        task.add_done_callback(self._signals.discard)

    async def _signal(self, name: str) -> None:
        """Raises nothing: a command that cannot be reached ends with its pod."""
        if name == "KILL" and self._connection.when() is None:
            # There may be no connection yet, or none any more.
            with suppress(RuntimeError):
                self._connection.reschedule(asyncio.get_running_loop().time() + _STREAM_SECONDS)
        argv = ["/bin/sh", "-c", manifest.KILL, INSIDE, self.identity, name]
        with suppress(Exception):
            async with asyncio.timeout(_STREAM_SECONDS):
                await self._exchange(argv, b"", {})


async def _send_payload(socket: ClientWebSocketResponse, payload: bytes) -> None:
    # A command may end without reading its stdin; its outcome still counts.
    with suppress(OSError, ClientError):
        for start in range(0, len(payload), _CHUNK_BYTES):
            await socket.send_bytes(bytes([STDIN]) + payload[start : start + _CHUNK_BYTES])


def _find_end(pod: Pod | None) -> str | None:
    return "it was removed" if pod is None else cluster.find_end(pod)


class ShellOutput:
    """The stdout of the shell that runs a command: its first byte says that the command started, its last one that the command has ended
    and left nothing; what lies between is the command's own and goes to `sink`."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._held = b""
        self.has_begun = False

    @property
    def has_ended(self) -> bool:
        """Valid once no more output comes."""
        return self._held == ENDED

    def feed(self, data: bytes) -> None:
        had_begun, self.has_begun = self.has_begun, True
        data = self._held + (data if had_begun else data[1:])
        # This byte is the last one only if none follows it.
        self._held = ENDED if data.endswith(ENDED) else b""
        if rest := data[: len(data) - len(self._held)]:
            self._sink.feed(rest)

    def get_tail(self) -> bytes:
        return self._sink.get_tail()


def parse_exit_code(outcome: Mapping[str, Any]) -> int:
    """The exit code in the `Status` that ends an exec. Raises `RuntimeFailed` if it reports no command's end."""
    if outcome.get("status") == "Success":
        return 0
    causes = (outcome.get("details") or {}).get("causes") or ()
    for cause in causes:
        if outcome.get("reason") == "NonZeroExitCode" and cause.get("reason") == "ExitCode":
            return int(cause["message"])
    raise RuntimeFailed(f"the command did not run: {outcome.get('message') or outcome.get('reason') or outcome}")
