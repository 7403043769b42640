"""One command in a pod, from its start to the end of all it started: a connection of its own (`pod_exec`) to a shell in the pod that reads
it from there, runs it and ends what it leaves (`pod_scripts`). A second connection sends it signals."""

from __future__ import annotations

import asyncio
import signal
import uuid
from functools import partial

from rollout.runtimes import pod_scripts, pod_status
from rollout.runtimes.base import DiskFull, Executed, RuntimeFailed
from rollout.runtimes.cluster import Cluster, Pod
from rollout.runtimes.command import Limits, Sink, followed
from rollout.runtimes.files import is_full
from rollout.runtimes.output import Output
from rollout.runtimes.pod_exec import Answered, Lost, Stream
from rollout.runtimes.pod_manifest import INSIDE
from rollout.runtimes.threads import in_thread

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
        argv = ["/bin/sh", "-c", pod_scripts.RUN, INSIDE, self.identity, *sizes]
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
        if pod is not None and pod_status.out_of_memory(pod):
            return 128 + signal.SIGKILL
        refused = DiskFull if pod is not None and pod_status.evicted(pod) and "storage" in why else RuntimeFailed
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
        argv = ["/bin/sh", "-c", pod_scripts.KILL, INSIDE, self.identity, name]
        with Output(_KEPT_BYTES) as stdout, Output(_KEPT_BYTES) as stderr:
            sent = Stream(partial(self._cluster.connected, self._pod, argv, False), b"", stdout, stderr, lambda: None)
            loop = asyncio.get_running_loop()
            loop.call_later(_STREAM_SECONDS, sent.abort)
            if name == "KILL":
                loop.call_later(_STREAM_SECONDS, stream.abort)
            await asyncio.gather(in_thread(sent.run), return_exceptions=True)


def _end_of(pod: Pod | None) -> str | None:
    return "somebody removed it" if pod is None else pod_status.ended(pod)
