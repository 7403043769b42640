"""A Kubernetes API server of a cluster of one machine, as far as runtimes use one: `python kube_server.py`, which prints its URL and lives
until its stdin ends. Pods, their phases, watches, deletion, exec over a websocket with the protocols v5 and v4, network policies.

Every pod is a `bwrap_container`, and what is executed in it really is. What an image cannot do is told by its name: `missing` is never
pulled, `ends` ends at once. A pod that asks for 1000 cores finds no machine. Below /test a test looks at what was sent, and breaks things.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import sys
import uuid
from asyncio.subprocess import Process
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from aiohttp import WSMsgType, web

from contract.tasks import RuntimeSpec
from rollout.runtimes import seccomp
from rollout.runtimes.local.resources import Resources, find_hierarchies
from tests.support.runtimes.bwrap_container import Container
from tests.support.runtimes.bwrap_words import filtered, view

PODS = "/api/v1/namespaces/{namespace}/pods"
PROFILE = "profiles/verbatim.json"
POLICIES = "/apis/networking.k8s.io/v1/namespaces/{namespace}/networkpolicies"


class Machine:
    """The cluster's state."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, Any]] = {}
        self.containers: dict[str, tuple[Container, Resources]] = {}
        self.history: list[tuple[int, str, dict[str, Any]]] = []
        self.changed = asyncio.Condition()
        self.versions = itertools.count(1)
        self.sent: list[dict[str, Any]] = []
        self.policies: list[dict[str, Any]] = []
        self.forbidden = self.full = False
        self.protocols = ["v5.channel.k8s.io", "v4.channel.k8s.io"]
        self.sockets: set[web.WebSocketResponse] = set()
        self.tasks: set[asyncio.Task[None]] = set()

    async def tell(self, kind: str, pod: dict[str, Any], **status: Any) -> None:
        pod["status"].update(status)
        version = next(self.versions)
        pod["metadata"]["resourceVersion"] = str(version)
        async with self.changed:
            self.history.append((version, kind, copy.deepcopy(pod)))
            self.changed.notify_all()

    async def contained(self, pod: dict[str, Any], **state: Any) -> None:
        each = {"name": "runtime", "image": "", "imageID": "", "ready": "running" in state, "restartCount": 0, "state": state}
        await self.tell("MODIFIED", pod, containerStatuses=[each])

    async def run(self, pod: dict[str, Any]) -> None:
        """What a scheduler and a kubelet do."""
        container = pod["spec"]["containers"][0]
        amounts = container["resources"]["limits"]
        if int(amounts["cpu"].removesuffix("m")) >= 1_000_000:
            reason = {
                "type": "PodScheduled",
                "status": "False",
                "reason": "Unschedulable",
                "message": "0/1 nodes are available",
            }
            await self.tell("MODIFIED", pod, conditions=[reason])
            return
        await self.contained(pod, waiting={"reason": "ContainerCreating"})
        if container["image"] == "missing":
            for why in ("ErrImagePull", "ImagePullBackOff"):
                await self.contained(pod, waiting={"reason": why, "message": "there is no image of that name"})
            return
        if container["image"] == "ends":
            await self.tell("MODIFIED", pod, phase="Failed")
            await self.contained(pod, terminated={"exitCode": 3, "reason": "Error"})
            return
        await self.start(pod, container["command"], amounts)

    async def start(self, pod: dict[str, Any], argv: list[str], amounts: dict[str, str]) -> None:
        spec = RuntimeSpec(cpus=2.0, memory_mb=int(amounts["memory"].removesuffix("Mi")))
        limits = Resources(spec, pod["metadata"]["name"], find_hierarchies(None))
        limits.make()
        security = pod["spec"]["securityContext"]
        container = Container(_holding(limits), security.get("runAsUser", 0), _find_filter(security["seccompProfile"]))
        await container.start(view({}, network=True), argv)
        self.containers[pod["metadata"]["uid"]] = container, limits
        await self.tell("MODIFIED", pod, phase="Running")
        await self.contained(pod, running={"startedAt": "2026-01-01T00:00:00Z"})

    async def end(self, pod: dict[str, Any]) -> None:
        container, limits = self.containers.pop(pod["metadata"]["uid"], (None, None))
        if container is not None and limits is not None:
            await container.stop()
            await limits.remove()


def _find_filter(profile: dict[str, str]) -> list[str]:
    """Words before a command. The machine has one profile, the project's own; its runtime's default is none."""
    machine = seccomp.find_machine()
    if profile["type"] == "RuntimeDefault" or machine is None:
        return []
    assert profile == {"type": "Localhost", "localhostProfile": PROFILE}
    return filtered(seccomp.compile_filter(machine, shared_memory=True))


def _holding(limits: Resources) -> Callable[[], None]:
    def held() -> None:
        limits.hold(os.getpid())

    return held


def refused(status: int, reason: str, message: str) -> web.Response:
    body = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": reason, "message": message, "code": status}
    return web.json_response(body, status=status)


class Api:
    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def create(self, request: web.Request) -> web.Response:
        pod = await request.json()
        self._machine.sent.append(copy.deepcopy(pod))
        name = pod["metadata"]["name"]
        if self._machine.full:
            return refused(403, "Forbidden", f'pods "{name}" is forbidden: exceeded quota: all, used: pods=1, limited: pods=1')
        if name in self._machine.pods:
            return refused(409, "AlreadyExists", f'pods "{name}" already exists')
        pod["metadata"] |= {"uid": str(uuid.uuid4()), "namespace": request.match_info["namespace"]}
        pod["status"] = {"phase": "Pending"}
        self._machine.pods[name] = pod
        await self._machine.tell("ADDED", pod)
        task = asyncio.ensure_future(self._machine.run(pod))
        self._machine.tasks.add(task)
        task.add_done_callback(self._machine.tasks.discard)
        return web.json_response(pod, status=201)

    def _found(self, request: web.Request) -> dict[str, Any] | None:
        return self._machine.pods.get(request.match_info["name"])

    async def read(self, request: web.Request) -> web.Response:
        pod = self._found(request)
        return web.json_response(pod) if pod else refused(404, "NotFound", "pods not found")

    async def listed(self, request: web.Request) -> web.StreamResponse:
        def wanted(pod: dict[str, Any]) -> bool:
            field = request.query.get("fieldSelector", "").removeprefix("metadata.name=")
            label = request.query.get("labelSelector", "")
            return (not field or pod["metadata"]["name"] == field) and (not label or label in pod["metadata"]["labels"])

        if request.query.get("watch", "").lower() == "true":
            return await self._watched(request, wanted)
        items = [pod for pod in self._machine.pods.values() if wanted(pod)]
        return web.json_response({"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}, "items": items})

    async def _watched(self, request: web.Request, wanted: Callable[[dict[str, Any]], bool]) -> web.StreamResponse:
        machine = self._machine
        response = web.StreamResponse(headers={"Content-Type": "application/json"})
        await response.prepare(request)
        since = int(request.query.get("resourceVersion") or 0)
        with suppress(TimeoutError, ConnectionError):
            async with asyncio.timeout(float(request.query.get("timeoutSeconds", 60))):
                while True:
                    for version, kind, pod in [each for each in machine.history if each[0] > since]:
                        since = version
                        if wanted(pod):
                            await response.write(json.dumps({"type": kind, "object": pod}).encode() + b"\n")
                    async with machine.changed:
                        while machine.history[-1][0] <= since:
                            await machine.changed.wait()
        return response

    async def delete(self, request: web.Request) -> web.Response:
        pod = self._found(request)
        body = await request.json()
        self._machine.sent.append({"kind": "DeleteOptions", "apiVersion": "v1", **body})
        if pod is None:
            return refused(404, "NotFound", "pods not found")
        if (uid := (body.get("preconditions") or {}).get("uid")) and uid != pod["metadata"]["uid"]:
            return refused(409, "Conflict", "the uid is another")

        async def ended() -> None:
            await self._machine.end(pod)
            self._machine.pods.pop(pod["metadata"]["name"], None)
            await self._machine.tell("DELETED", pod)

        task = asyncio.ensure_future(ended())
        self._machine.tasks.add(task)
        task.add_done_callback(self._machine.tasks.discard)
        return web.json_response(pod)

    async def network_policies(self, request: web.Request) -> web.Response:
        body = {
            "kind": "NetworkPolicyList",
            "apiVersion": "networking.k8s.io/v1",
            "metadata": {},
            "items": self._machine.policies,
        }
        return web.json_response(body)

    async def make_policy(self, request: web.Request) -> web.Response:
        policy, policies = await request.json(), self._machine.policies
        if self._machine.forbidden:
            return refused(403, "Forbidden", "networkpolicies is forbidden: the service account cannot create it")
        if any(each["metadata"]["name"] == policy["metadata"]["name"] for each in policies):
            return refused(409, "AlreadyExists", "there is a policy of that name")
        if request.query.get("dryRun") != "All":
            self._machine.sent.append(copy.deepcopy(policy))
            policies.append(policy)
        return web.json_response(policy, status=201)

    async def exec(self, request: web.Request) -> web.StreamResponse:
        pod = self._found(request)
        if pod is None:
            return refused(404, "NotFound", "pods not found")
        if pod["metadata"]["uid"] not in self._machine.containers:
            return refused(400, "BadRequest", "the container does not run")
        socket = web.WebSocketResponse(protocols=self._machine.protocols, max_msg_size=0)
        await socket.prepare(request)
        process = await self._machine.containers[pod["metadata"]["uid"]][0].exec(request.query.getall("command"))
        self._machine.sockets.add(socket)
        try:
            await _executed(socket, process, request.query.get("stdin", "").lower() == "true")
        finally:
            self._machine.sockets.discard(socket)
        return socket


async def _executed(socket: web.WebSocketResponse, process: Process, stdin: bool) -> None:
    """A command outlives a connection that breaks."""
    assert process.stdin and process.stdout and process.stderr
    if not stdin:
        process.stdin.close()
    taken = asyncio.ensure_future(_taken(socket, process.stdin))
    await asyncio.gather(_told(socket, 1, process.stdout), _told(socket, 2, process.stderr))
    code = await process.wait()
    code = code if code >= 0 else 128 - code
    outcome: dict[str, Any] = {"metadata": {}, "status": "Success"}
    if code:
        causes = [{"reason": "ExitCode", "message": str(code)}]
        outcome |= {"status": "Failure", "reason": "NonZeroExitCode", "details": {"causes": causes}}
    with suppress(ConnectionError, RuntimeError):
        await socket.send_bytes(b"\3" + json.dumps(outcome).encode())
    taken.cancel()
    await socket.close()


async def _taken(socket: web.WebSocketResponse, stdin: asyncio.StreamWriter) -> None:
    async for message in socket:
        with suppress(ConnectionError):
            if message.type == WSMsgType.BINARY and message.data[:1] == b"\0":
                stdin.write(message.data[1:])
                await stdin.drain()
            elif message.type == WSMsgType.BINARY and message.data[:1] == b"\xff":
                stdin.close()


async def _told(socket: web.WebSocketResponse, channel: int, stream: asyncio.StreamReader) -> None:
    while data := await stream.read(1 << 14):
        with suppress(ConnectionError, RuntimeError):
            await socket.send_bytes(bytes([channel]) + data)


class Test:
    """What a test does to the cluster: POST /test/WHAT."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine

    async def sent(self, request: web.Request) -> web.Response:
        return web.json_response(self._machine.sent)

    async def did(self, request: web.Request) -> web.Response:
        machine = self._machine
        told = await request.json()
        match request.match_info["what"]:
            case "policies":
                machine.policies = told
            case "forbid":
                machine.forbidden = told
            case "fill":
                machine.full = told
            case "protocols":
                machine.protocols = told
            case "break":
                for socket in machine.sockets:
                    if socket._req is not None and socket._req.transport is not None:
                        socket._req.transport.abort()
            case "end":
                pod = machine.pods[told["name"]]
                await machine.end(pod)
                await machine.tell("MODIFIED", pod, phase="Failed", **told["status"])
                await machine.contained(pod, terminated=told["terminated"])
        return web.json_response({})


async def main() -> None:
    machine = Machine()
    api, test = Api(machine), Test(machine)
    app = web.Application(client_max_size=1 << 30)
    app.add_routes(
        [
            web.post(PODS, api.create),
            web.get(PODS, api.listed),
            web.get(PODS + "/{name}", api.read),
            web.delete(PODS + "/{name}", api.delete),
            web.get(PODS + "/{name}/exec", api.exec),
            web.get(POLICIES, api.network_policies),
            web.post(POLICIES, api.make_policy),
            web.get("/test/sent", test.sent),
            web.post("/test/{what}", test.did),
        ]
    )
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    sys.stdout.write(f"{runner.addresses[0][1]}\n")
    sys.stdout.flush()
    await asyncio.to_thread(sys.stdin.read)
    for pod in list(machine.pods.values()):
        await machine.end(pod)
    await runner.cleanup()


if __name__ == "__main__":
    asyncio.run(main())
