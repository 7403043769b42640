"""Pods as runtimes: what is sent to a cluster, and what becomes of one that cannot run or ends (the contract: test_contract)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from jsonschema import Draft202012Validator
from kubernetes_validate.utils import schema_contents
from referencing import Registry, Resource

from contract.attempts import Failure
from contract.tasks import RuntimeSpec
from rollout.attempts import RolloutFailed
from rollout.runtimes.base import BadRuntime, DiskFull, Logs, NoRoom, ProxyAddress, RuntimeFailed
from rollout.runtimes.kubernetes import cluster as module
from rollout.runtimes.kubernetes import exec, network
from rollout.runtimes.kubernetes.cluster import load_cluster
from rollout.runtimes.kubernetes.exec import parse_exit_code
from rollout.runtimes.kubernetes.manifest import Owner, PodSettings, ResolvedProxy, make_labels, make_manifest
from rollout.runtimes.settings import PodFields, RuntimeSettings, read_environment
from tests.support.runtimes.kube_cluster import TestCluster, cluster, in_pods, kubeconfig
from tests.support.runtimes.rollout_nodes import install_what_lacks
from tests.support.runtimes.runtime_places import NOWHERE, out, shell

SPEC = RuntimeSpec(kind="kubernetes", image="debian:12", cpus=0.5, memory_mb=512, disk_mb=2048)
VERSIONS = ("1.29", "1.31", "1.33", "1.35", "1.37")
NAME = "vb-1-2-0-0-run"
BY_ADDRESS = ResolvedProxy("192.0.2.9", ("192.0.2.9",), 8700)
BY_NAME = ResolvedProxy("proxy.example", ("192.0.2.9", "2001:db8::9"), 443)
SETTINGS = RuntimeSettings(kubernetes_proxy_pods={"app": "verbatim"}, kubernetes_proxy_namespace="services")
FIELDS = {
    "annotations": {"example.com/team": "rl", "karpenter.sh/do-not-disrupt": "false"},
    "nodeSelector": {"pool": "rollouts"},
    "tolerations": [
        {"key": "rl", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 60},
        {"key": "a", "value": "b"},
    ],
    "runtimeClassName": "gvisor",
    "priorityClassName": "rollouts",
}
POLICY = {
    "metadata": {"name": "given"},
    "spec": {"podSelector": {"matchLabels": {"verbatim.network": "proxy"}}, "egress": [{}]},
}


@pytest.fixture
def broken() -> Iterator[TestCluster]:
    """A cluster that a test may change; it is as it was afterwards."""
    yield cluster()
    cluster().do("policies", [])
    cluster().do("forbid", False)
    cluster().do("fill", False)
    cluster().do("protocols", ["v5.channel.k8s.io", "v4.channel.k8s.io"])


def described(spec: RuntimeSpec = SPEC, **given: Any) -> dict[str, Any]:
    usual: dict[str, Any] = {
        "proxy": BY_ADDRESS,
        "owner": None,
        "service_account": None,
        "user": 1000,
        "deadline_seconds": 3600,
        "fields": PodFields(),
        "seccomp_profile": None,
    }
    return make_manifest(spec, NAME, make_labels(spec, NAME), PodSettings(**usual | given))


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_made_is_what_the_schemas_of_many_versions_take(version: str) -> None:
    for made in (
        described(),
        described(replace(SPEC, disk_mb=None, network="full"), proxy=None, user=None),
        described(owner=Owner("node-0", "3f0c"), service_account="rollouts", user=0, proxy=BY_NAME),
        described(fields=PodFields.model_validate(FIELDS)),
        network.make_policy(BY_ADDRESS, RuntimeSettings()),
        network.make_policy(BY_NAME, SETTINGS),
    ):
        kubernetes_validate.validate(made, version, strict=True)


@pytest.mark.cell("K1", "K5", "K6")
def test_a_pod_asks_for_what_it_may_use_and_has_no_token() -> None:
    spec = described()["spec"]
    amounts = {"cpu": "500m", "memory": "512Mi", "ephemeral-storage": "2048Mi"}
    assert spec["containers"][0]["resources"] == {"requests": amounts, "limits": amounts}
    assert (spec["automountServiceAccountToken"], spec["restartPolicy"]) == (False, "Never")
    assert spec["activeDeadlineSeconds"] == 3600


@pytest.mark.cell("K4")
def test_commands_are_a_users_without_capabilities_and_roots_only_where_that_is_asked_for() -> None:
    assert RuntimeSettings().kubernetes_user == 1000
    spec = described()["spec"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (1000, True)
    assert spec["containers"][0]["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    spec = described(user=0)["spec"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"]["runAsNonRoot"]) == (0, False)
    assert spec["containers"][0]["securityContext"]["allowPrivilegeEscalation"] is False


def test_a_pod_knows_the_proxys_name_and_asks_nobody_for_others() -> None:
    spec = described(proxy=BY_NAME)["spec"]
    assert spec["hostAliases"] == [{"ip": each, "hostnames": ["proxy.example"]} for each in BY_NAME.addresses]
    assert (spec["dnsPolicy"], spec["dnsConfig"]) == ("None", {"nameservers": ["127.0.0.1"]})
    assert not {"dnsPolicy", "hostAliases"} & set(described(proxy=None)["spec"])


@pytest.mark.cell("K2", "K7")
def test_a_policy_lets_pods_out_to_the_proxy_alone_and_nobody_in() -> None:
    spec = network.make_policy(BY_NAME, SETTINGS)["spec"]
    blocks = [{"ipBlock": {"cidr": "192.0.2.9/32"}}, {"ipBlock": {"cidr": "2001:db8::9/128"}}]
    pods = {"podSelector": {"matchLabels": {"app": "verbatim"}}}
    there = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "services"}}}
    assert spec["egress"] == [{"to": blocks, "ports": [{"protocol": "TCP", "port": 443}]}, {"to": [pods | there]}]
    assert (spec["ingress"], spec["policyTypes"]) == ([], ["Ingress", "Egress"])


async def test_a_proxy_that_only_the_node_reaches_or_that_nobody_knows_is_told() -> None:
    with pytest.raises(RuntimeFailed, match="on the node only"):
        await network.resolve_proxy(ProxyAddress("localhost", 8700))
    with pytest.raises(RuntimeFailed, match=r"no-such-host\.invalid"):
        await network.resolve_proxy(ProxyAddress("no-such-host.invalid", 8700))


def test_a_pod_belongs_to_the_nodes_own_and_carries_what_a_policy_chooses_by() -> None:
    metadata = described(owner=Owner("node-0", "3f0c"))["metadata"]
    assert metadata["ownerReferences"] == [{"apiVersion": "v1", "kind": "Pod", "name": "node-0", "uid": "3f0c"}]
    assert metadata["labels"]["verbatim.network"] == "proxy"
    assert metadata["labels"]["verbatim.runtime"] == "vb-1-2-0-0-run"


def chosen(**selector: Any) -> dict[str, Any]:
    return {"podSelector": selector, "policyTypes": ["Egress"]}


@pytest.mark.parametrize(
    ("spec", "held"),
    [
        (POLICY["spec"], True),
        ({"podSelector": {}, "egress": [{}]}, True),
        ({"podSelector": {}, "policyTypes": ["Ingress"]}, False),
        ({"podSelector": {}}, False),
        (chosen(matchLabels={"verbatim.network": "full"}), False),
        (chosen(matchExpressions=[{"key": "verbatim.network", "operator": "In", "values": ["proxy"]}]), True),
        (chosen(matchExpressions=[{"key": "verbatim.network", "operator": "DoesNotExist"}]), False),
    ],
)
def test_a_policy_holds_a_pod_that_it_chooses_when_it_is_about_egress(spec: dict[str, Any], held: bool) -> None:
    assert network.is_isolated({"verbatim.network": "proxy"}, [{"spec": spec}]) is held


def test_the_outcome_of_a_command_is_its_exit_code_or_no_command() -> None:
    failure = {
        "status": "Failure",
        "reason": "NonZeroExitCode",
        "details": {"causes": [{"reason": "ExitCode", "message": "7"}]},
    }
    assert parse_exit_code({"status": "Success"}) == 0
    assert parse_exit_code(failure) == 7
    with pytest.raises(RuntimeFailed, match="no such container"):
        parse_exit_code({"status": "Failure", "reason": "InternalError", "message": "no such container"})


def test_settings_come_from_the_environment() -> None:
    env = {"VERBATIM_KUBERNETES_NAMESPACE": "n", "VERBATIM_KUBERNETES_USER": "image", "POD_NAME": "node-0", "POD_UID": "3f0c"}
    settings = read_environment({**env, "VERBATIM_KUBERNETES_PROXY_PODS": "app=verbatim, tier=x"})
    assert (settings.kubernetes_namespace, settings.kubernetes_user) == ("n", None)
    assert (settings.kubernetes_pod, settings.kubernetes_pod_uid) == ("node-0", "3f0c")
    assert settings.kubernetes_proxy_pods == {"app": "verbatim", "tier": "x"}
    assert read_environment({}) == replace(
        RuntimeSettings(), local_dir=read_environment({}).local_dir, apptainer_dir=read_environment({}).apptainer_dir
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"USER": "me"},
        {"USER": "-1"},
        {"PROXY_PODS": "verbatim"},
        {"START_SECONDS": "soon"},
        {"DEADLINE_SECONDS": "0"},
        {"POD_FIELDS": "pool=rollouts"},
        {"POD_FIELDS": '{"hostNetwork": true}'},
        {"POD_FIELDS": '{"nodeSelector": {"a pool": "rollouts"}}'},
        {"POD_FIELDS": '{"tolerations": [{"key": "rl", "effect": "Never"}]}'},
        {"POD_FIELDS": '{"tolerations": [{"key": "rl", "operator": "Exists", "value": "x"}]}'},
    ],
)
def test_a_variable_that_is_no_such_thing_is_told(wrong: dict[str, str]) -> None:
    with pytest.raises(BadRuntime, match=f"VERBATIM_KUBERNETES_{next(iter(wrong))}"):
        read_environment({f"VERBATIM_KUBERNETES_{name}": text for name, text in wrong.items()})


async def test_a_quota_that_is_used_up_is_not_taken_for_the_tasks_fault(broken: TestCluster) -> None:
    broken.do("fill", True)
    assert await in_pods().kind.probe() is None
    with pytest.raises(NoRoom, match="exceeded quota"):
        await in_pods().runtime(NOWHERE).start()


async def test_a_node_without_a_cluster_or_with_a_setting_that_is_none_says_so(broken: TestCluster) -> None:
    assert "no Kubernetes cluster is configured" in str(await in_pods(kubernetes_context="nowhere").kind.probe())
    assert "choose one of made, given, elsewhere" in str(await in_pods(kubernetes_network_policy="never").kind.probe())
    broken.do("forbid", True)
    assert "403 networkpolicies is forbidden" in str(await in_pods().kind.probe())
    with pytest.raises(RuntimeFailed, match="403"):
        await in_pods().runtime(NOWHERE).start()


async def test_what_is_sent_while_it_is_used_is_what_the_schemas_take(broken: TestCluster) -> None:
    place = in_pods(kubernetes_pod="node-0", kubernetes_pod_uid="3f0c", kubernetes_pod_namespace="rollouts")
    async with place.started(), place.started():
        pass
    sent = broken.sent()
    # Sent again after a test that emptied the cluster of policies.
    (policy,) = {
        each["metadata"]["name"]: each for each in sent if each["kind"] == "NetworkPolicy" and "192.0.2.9/32" in str(each)
    }.values()
    pods = [each for each in sent if each["kind"] == "Pod" and each["metadata"]["name"].startswith(place.names)]
    assert [each["metadata"]["ownerReferences"][0]["uid"] for each in pods] == ["3f0c", "3f0c"]
    assert all(network.is_isolated(each["metadata"]["labels"], [policy]) for each in pods)
    for version in VERSIONS:
        for each in (policy, *pods):
            kubernetes_validate.validate(each, version, strict=True)
        check_options(sent[-1], version)


def check_options(options: dict[str, Any], version: str) -> None:
    """Those of a deletion, whose schema `kubernetes_validate` has but does not find."""
    folder = f"kubernetes-json-schema/v{version}.0-local-strict"
    schema, known = (schema_contents(f"{folder}/{name}.json", version) for name in ("deleteoptions-meta-v1", "_definitions"))
    registry = Resource.from_contents(schema) @ (Resource.from_contents(known) @ Registry())
    Draft202012Validator(schema, registry=registry).validate(options)


async def test_an_owner_in_another_namespace_is_none() -> None:
    place = in_pods(kubernetes_pod="node-0", kubernetes_pod_uid="3f0c", kubernetes_pod_namespace="nodes")
    async with place.started():
        sent = [each for each in cluster().sent() if each["kind"] == "Pod" and each["metadata"]["name"].startswith(place.names)]
    assert "ownerReferences" not in sent[0]["metadata"]


@pytest.mark.parametrize(
    ("changes", "why"),
    [({"image": "missing"}, "ImagePullBackOff: there is no image of that name"), ({"image": "ends"}, "Error")],
)
async def test_a_pod_that_cannot_run_says_why_and_is_removed(changes: dict[str, Any], why: str) -> None:
    place = in_pods()
    with pytest.raises(RuntimeFailed, match=why):
        await place.runtime(NOWHERE, **changes).start()
    assert await place.kind.sweep(place.names) == 0


async def test_a_pod_that_finds_no_machine_in_time_says_what_it_waits_for_and_is_removed() -> None:
    for seconds in (0.3, 3.0, 30.0):
        place = in_pods(kubernetes_start_seconds=seconds)
        with pytest.raises(RuntimeFailed, match=f"it does not run after {seconds:g} seconds: ") as told:
            await place.runtime(NOWHERE, cpus=1000.0).start()
        assert await place.kind.sweep(place.names) == 0
        # On a slow machine the cluster has not looked for one by then.
        if "Unschedulable: 0/1 nodes are available" in str(told.value):
            return
    pytest.fail(str(told.value))


@pytest.mark.cell("K2")
async def test_nothing_starts_that_no_policy_holds_where_one_is_to_be_there() -> None:
    place = in_pods(kubernetes_network_policy="given")
    cluster().do("policies", [])
    assert "no NetworkPolicy" in str(await place.kind.probe())
    with pytest.raises(RuntimeFailed, match="no NetworkPolicy"):
        await place.runtime(NOWHERE).start()
    async with place.started(network="full") as runtime:
        assert await out(runtime, "echo free") == "free\n"
    cluster().do("policies", [POLICY])
    async with place.started() as runtime:
        assert await out(runtime, "echo held") == "held\n"
    cluster().do("policies", [])
    assert await in_pods(kubernetes_network_policy="elsewhere").kind.probe() is None


async def test_commands_are_not_roots_unless_the_task_says_so_and_find_a_place_to_work() -> None:
    place = in_pods()
    async with place.started() as runtime:
        assert await out(runtime, "id -u; pwd; echo $HOME") == "1000\n/run/verbatim/workspace\n/run/verbatim/home\n"
    async with place.started(options={"user": 0}) as runtime:
        assert await out(runtime, "id -u; pwd; echo $HOME") == "0\n/workspace\n/root\n"
    with pytest.raises(RuntimeFailed, match="user 1000 cannot write /testbed"):
        await place.runtime(NOWHERE, workdir="/testbed").start()
    with pytest.raises(BadRuntime, match=r"options\.user"):
        place.kind.check(replace(SPEC, options={"user": "root"}))


def sent_pod(names: str) -> dict[str, Any]:
    (pod,) = (each for each in cluster().sent() if each["kind"] == "Pod" and each["metadata"]["name"].startswith(names))
    return pod


async def test_pods_stand_where_their_operator_wants_them_and_no_autoscaler_moves_them() -> None:
    place = in_pods()
    async with place.started():
        pod = sent_pod(place.names)
    kept = {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false", "karpenter.sh/do-not-disrupt": "true"}
    assert pod["metadata"]["annotations"] == kept
    place = in_pods(
        kubernetes_pod_fields=read_environment({"VERBATIM_KUBERNETES_POD_FIELDS": json.dumps(FIELDS)}).kubernetes_pod_fields
    )
    async with place.started():
        pod = sent_pod(place.names)
    assert pod["metadata"]["annotations"] == {**kept, **FIELDS["annotations"]}  # type: ignore[dict-item]
    assert {name: pod["spec"][name] for name in FIELDS if name != "annotations"} == {
        name: value for name, value in FIELDS.items() if name != "annotations"
    }
    for version in VERSIONS:
        kubernetes_validate.validate(pod, version, strict=True)


async def test_a_task_chooses_among_the_machines_of_its_operator_and_no_others() -> None:
    place = in_pods(kubernetes_pod_fields=PodFields.model_validate(FIELDS))
    async with place.started(options={"node_selector": {"zone": "a", "pool": "rollouts"}}):
        assert sent_pod(place.names)["spec"]["nodeSelector"] == {"pool": "rollouts", "zone": "a"}
    with pytest.raises(RuntimeFailed, match="pool=engines contradicts this node, whose pods run on pool=rollouts"):
        await place.runtime(NOWHERE, options={"node_selector": {"pool": "engines"}}).start()
    for wrong in ("zone=a", {"zone": 1}, {"a zone": "a"}):
        with pytest.raises(BadRuntime, match=r"options\.node_selector is not valid"):
            place.kind.check(replace(SPEC, options={"node_selector": wrong}))
    with pytest.raises(BadRuntime, match="has no 'tolerations'"):
        place.kind.check(replace(SPEC, options={"tolerations": []}))


async def test_a_step_cannot_have_another_network_than_its_pod() -> None:
    async with in_pods().started() as runtime:
        with pytest.raises(RuntimeFailed, match="one network"):
            await shell(runtime, "true", network="full")


async def test_a_harness_that_is_not_in_the_image_of_a_pod_and_cannot_be_fetched_is_missing(tmp_path: Path) -> None:
    """The old bug: a broken runtime, three attempts of it, and no word of the harness."""
    async with in_pods().started() as runtime:
        with pytest.raises(RolloutFailed, match=r"lacking: .* use an image that has it") as failed:
            await install_what_lacks(runtime, tmp_path)
    assert failed.value.failure is Failure.HARNESS_MISSING


async def test_a_command_that_kills_its_own_shell_has_its_end_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exec, "_STATUS_SECONDS", 0.1)
    async with in_pods().started() as runtime:
        done = await shell(runtime, "echo before; sleep 600 > /dev/null 2>&1 & kill -9 $PPID")
        assert (done.exit_code, done.stdout) == (137, b"before\n")
        assert "sleep\0600" not in await out(runtime, "cat /proc/[0-9]*/cmdline || true")


async def test_a_cluster_that_knows_version_4_of_exec_only_will_do(broken: TestCluster) -> None:
    broken.do("protocols", ["v4.channel.k8s.io"])
    async with in_pods().started() as runtime:
        done = await shell(runtime, "cat; exit 3", stdin=b"x" * 300_000)
    assert (done.exit_code, done.stdout) == (3, b"x" * 300_000)


async def test_a_token_that_is_replaced_is_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client itself keeps the first one of a kubeconfig for good."""
    from kubernetes.aio.config import kube_config

    in_pods()
    config = json.loads(kubeconfig().read_text())
    token = tmp_path / "token"
    token.write_text("first")
    config["users"][0]["user"] = {"tokenFile": str(token)}
    path = tmp_path / "config"
    path.write_text(json.dumps(config))
    monkeypatch.setattr(kube_config, "KUBE_CONFIG_DEFAULT_LOCATION", str(path))
    loaded = await load_cluster(RuntimeSettings())
    monkeypatch.setattr(module, "_TOKEN_SECONDS", 0.0)
    for text in ("first", "second"):
        token.write_text(text)
        await loaded.list_pods()
        assert loaded._configuration.api_key["BearerToken"] == f"Bearer {text}"


@pytest.mark.parametrize(
    ("terminated", "status", "expected"),
    [
        ({"reason": "OOMKilled", "exitCode": 137}, {}, 137),
        ({"exitCode": 137}, {"reason": "Evicted", "message": "local ephemeral storage exceeds the limit"}, DiskFull),
        ({"exitCode": 137}, {"reason": "DeadlineExceeded", "message": "the pod was active too long"}, RuntimeFailed),
    ],
)
async def test_a_pod_that_ends_tells_its_command_why(
    terminated: dict[str, Any], status: dict[str, str], expected: Any, tmp_path: Path
) -> None:
    place = in_pods()
    async with place.started() as runtime:
        logs = Logs(tmp_path / "out", tmp_path / "err")
        running = asyncio.ensure_future(shell(runtime, "echo one; sleep 600", logs=logs))
        while not (logs.stdout.exists() and logs.stdout.read_bytes()):
            await asyncio.sleep(0.05)
        told = {"name": runtime.name, "status": status, "terminated": terminated}  # type: ignore[attr-defined]
        await asyncio.to_thread(cluster().do, "end", told)
        if expected == 137:
            assert (await running).exit_code == 137
        else:
            with pytest.raises(expected, match=status["message"]):
                await running
