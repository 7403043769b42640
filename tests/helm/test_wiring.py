"""What the chart tells its processes is what they understand: settings, flags, ports and paths, times, rights, addresses."""

from __future__ import annotations

import json
import re
import socket
import subprocess
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args
from urllib.parse import urlsplit

import pytest
import yaml
from typer.main import get_command

from cli.main import app
from cli.rollout_service import KNOWN, add_rollouts
from cli.serving.server import CUT_SECONDS, listen
from examples.vllm_server import Device, vllm_command
from proxy.app import create_app
from proxy.call.http import Routes
from proxy.dialects.catalogue import dialects
from proxy.engine.pool.membership import parse_engine
from proxy.metrics import EngineNumbers, Metrics
from proxy.settings import Settings
from proxy.store.node import Address
from proxy.tasks.metrics import QUEUE_LABELS, STAGES
from rollout.node import STOP_SECONDS
from rollout.runtimes.kubernetes import cluster
from rollout.runtimes.settings import PodFields, read_environment
from tests.support.documents.helm_chart import (
    CHART,
    MATRIX,
    NAMESPACE,
    Object,
    Values,
    container,
    environment,
    namespace_of,
    objects,
    pod_of,
    pods,
    the,
)
from tests.support.documents.prometheus_rules import promtool
from tests.support.documents.settings_in_code import variables

OTHERS = re.compile(r"VLLM_|HF_TOKEN$|HOME$|USER$|TORCHDYNAMO_DISABLE$|REDIS_PASSWORD$|REDISCLI_AUTH$")
"""Variables of vLLM and Redis, and what others are made of."""
NAMED = list(MATRIX.items())
WITH_NODES = [name for name, values in NAMED if values.get("nodes", {}).get("enabled", True)]


def each_container(values: Values, name: str) -> list[Object]:
    return [container(pod) for pod in pods(values) if container(pod)["name"] == name]


def proxy_of(values: Values) -> Object:
    return container(pod_of(the(values, "Deployment", "-proxy")) or {})


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_every_variable_is_one_that_somebody_reads(values: Values) -> None:
    ours = {name for pod in pods(values) for name in environment(container(pod)) if not OTHERS.match(name)}
    assert ours - variables() == set()


@pytest.mark.parametrize("values", MATRIX.values(), ids=MATRIX.keys())
def test_the_proxys_settings_are_valid_ones(values: Values, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    told = environment(proxy_of(values))
    for role in ("ADMIN", "TRAINER", "NODE"):
        (tmp_path / role).write_text("a-token-of-the-test\n")
        told[f"VERBATIM_{role}_TOKEN_FILE"] = str(tmp_path / role)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    settings = Settings()
    assert settings.host == ("::" if values.get("ipFamily") == "IPv6" else "0.0.0.0")
    ports = {each["name"]: each["containerPort"] for each in proxy_of(values)["ports"]}
    assert ports == {"http": settings.port, "control": settings.control_port}
    assert [parse_engine(url).url.rpartition(":")[0] for url in settings.engine if url.startswith("dns://demo")] == (
        [f"dns://demo-verbatim-vllm.{NAMESPACE}.svc"]
        if values.get("vllm", {}).get("enabled", True) and "fullnameOverride" not in values
        else []
    )
    if values.get("weights", {}).get("enabled", True):
        assert settings.weights_roots == [Path("/weights")]


@pytest.mark.parametrize(
    ("name", "kind", "places"),
    [
        ("defaults", "single", (("demo-verbatim-redis", 6379),)),
        ("engines and Sentinels of one's own", "sentinel", (("a.redis", 26379), ("b.redis", 26379))),
        ("a cluster without a password", "cluster", (("a", 7000), ("b", 7000))),
        ("a cluster over TLS", "cluster", (("a", 7000),)),
    ],
)
def test_the_address_of_the_store_is_understood(name: str, kind: str, places: Any) -> None:
    expanded = environment(proxy_of(MATRIX[name]))["VERBATIM_REDIS"].replace("$(REDIS_PASSWORD)", "s3cret")
    address = Address.parse(expanded)
    assert (address.kind, address.places) == (kind, places)
    assert "s3cret" not in address.name
    if name == "a cluster over TLS":
        assert address.server(("c", 6379)) == "rediss://:s3cret@c:6379?ssl_ca_certs=/etc/verbatim/redis/ca.crt"
    if kind == "sentinel":
        assert address.service == "mymaster"
        assert address.server(("c", 6379)) == "rediss://verbatim:s3cret@c:6379/0?ssl_ca_certs=/etc/verbatim/redis/ca.crt"
        mounts = {mount["mountPath"]: mount["name"] for mount in proxy_of(MATRIX[name])["volumeMounts"]}
        assert mounts["/etc/verbatim/redis"] == "redis-tls"
    if name in WITH_NODES:
        (node,) = each_container(MATRIX[name], "node")
        assert not {"VERBATIM_REDIS", "REDIS_PASSWORD"} & environment(node).keys()
        whole = (pod_of(the(MATRIX[name], "Deployment", "-node")) or {})["spec"]
        assert "redis" not in json.dumps([node["volumeMounts"], whole["volumes"]])


def test_every_flag_is_one_of_its_command() -> None:
    """Other than by starting it: a node refuses a runtime that its machine lacks."""
    main: Any = get_command(app)
    known = {
        command: {opt for parameter in main.commands[command].params for opt in parameter.opts} for command in ("serve", "node")
    }
    for _, values in NAMED:
        for one in (each for name in ("proxy", "node") for each in each_container(values, name)):
            command, *flags = one["args"]
            assert {flag.partition("=")[0] for flag in flags if flag.startswith("--")} <= known[command]


def test_where_pods_have_ipv6_addresses_everything_listens_there() -> None:
    values = MATRIX["IPv6 and a name service of one's own"]
    (engine,) = each_container(values, "vllm")
    assert engine["args"][engine["args"].index("--host") + 1] == environment(proxy_of(values))["VERBATIM_HOST"] == "::"
    with closing(listen("::", 0)) as listener, socket.create_connection(("::1", listener.getsockname()[1])) as client:
        assert client.family == socket.AF_INET6


@pytest.mark.parametrize("device", get_args(Device))
def test_the_engine_is_started_as_verbatim_starts_its_own(device: Any) -> None:
    values = {"vllm": {"device": device, "reasoningParser": "qwen3", "model": "org/model", "maxModelLen": 8192}}
    (one,) = each_container(values, "vllm")
    argv, env = vllm_command("org/model", 8000, host="0.0.0.0", reasoning_parser="qwen3", device=device, python="python3")
    assert one["command"] == argv[:3]
    pairs = list(zip(one["args"], one["args"][1:], strict=False))
    for flag, value in zip(argv[3:], [*argv[4:], ""], strict=True):
        assert flag in one["args"]
        assert value.startswith("--") or not flag.startswith("--") or not value or (flag, value) in pairs
    assert set(env) - {"PYTHONPATH"} <= environment(one).keys()


def routes() -> set[str]:
    made: Any = create_app(Settings(engine=[], redis="redis://127.0.0.1:1"), partial(add_rollouts, KNOWN))
    paths: set[str] = set(made._control.openapi()["paths"])
    return paths


def test_probes_scrapes_and_the_ingress_ask_for_what_is_there() -> None:
    values, there = MATRIX["everything"], routes()
    one = proxy_of(values)
    probed = {one[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")}
    assert probed == {"/healthz"} <= there
    for part, port in (("-proxy", "control"), ("-vllm", "http")):
        (endpoint,) = the(values, "ServiceMonitor", part)["spec"]["endpoints"]
        assert (endpoint["path"], endpoint["port"]) == ("/metrics", port) and "/metrics" in there
    paths = the(values, "Ingress", "verbatim")["spec"]["rules"][0]["http"]["paths"]
    health = [each["path"] for each in paths if each["pathType"] == "Exact"]
    assert health == ["/healthz"], "on both sides"
    paths = [each for each in paths if each["path"] not in health]
    table = Routes(dialects().values())
    assert all(
        table.is_harness("POST", each["path"] + "/x") is (each["backend"]["service"]["port"] == {"name": "http"})
        for each in paths
    )
    let_in = {each["path"] for each in paths}
    controlled = {"/" + path.split("/")[1] for path in there} - {"/healthz", "/readyz", "/metrics"}
    # The pages are for people, and in no description of the API.
    assert let_in - {"/r", "/v1", "/v1beta", "/v1alpha"} == controlled | {"/ui"}
    for asked in re.findall(r'ask\("\w+", f?"(/[\w/{}]*)"', (CHART / "files" / "test_service.py").read_text()):
        assert asked.replace("{name}", "{session_id}") in there or asked.startswith("/s/")


def test_a_pod_that_ends_has_the_time_that_its_process_takes() -> None:
    values: Values = {
        "proxy": {"drainSeconds": 900, "preStopSeconds": 20},
        "nodes": {"drainSeconds": 3_000_000},
        "vllm": {"drainSeconds": 300},
    }
    whole = (pod_of(the(values, "Deployment", "-proxy")) or {})["spec"]
    one = container({"spec": whole})
    assert environment(one)["VERBATIM_DRAIN_SECONDS"] == "900"
    assert one["lifecycle"]["preStop"]["exec"]["command"] == ["sleep", "20"]
    assert whole["terminationGracePeriodSeconds"] >= 20 + 900 + CUT_SECONDS
    node = (pod_of(the(values, "Deployment", "-node")) or {})["spec"]
    assert "--drain-seconds=3000000" in container({"spec": node})["args"]
    assert node["terminationGracePeriodSeconds"] >= 3_000_000 + 2 * STOP_SECONDS
    engine = (pod_of(the(values, "StatefulSet", "-vllm")) or {})["spec"]
    assert container({"spec": engine})["lifecycle"]["preStop"]["exec"]["command"][-1] == "300"
    assert engine["terminationGracePeriodSeconds"] > 300


def test_pods_are_scaled_by_metrics_that_there_are() -> None:
    values = MATRIX["everything"]
    (metric,) = the(values, "HorizontalPodAutoscaler", "-proxy")["spec"]["metrics"]
    assert f"\n{metric['pods']['metric']['name']} ".encode() in Metrics().page()
    for kind, name in (("Deployment", "-proxy"), ("Deployment", "-node"), ("StatefulSet", "-vllm")):
        assert "replicas" not in the(values, kind, name)["spec"]
    (trigger,) = the(values, "ScaledObject", "-node")["spec"]["triggers"]
    shown = re.findall(r"by \(([\w, ]+)\) \((\w+)\{", trigger["metadata"]["query"])
    assert shown == [(", ".join(QUEUE_LABELS), "verbatim_rollouts_waiting"), ("stage", "verbatim_rollouts_running")]
    assert re.search(r'stage!="(\w+)"', trigger["metadata"]["query"])[1] in STAGES  # type: ignore[index]


def test_nodes_are_scaled_by_what_waits_and_runs_in_their_own_release(tmp_path: Path) -> None:
    """Two releases in one namespace; each has two proxies, which show the same numbers. Only what waited was counted, so that nodes
    were taken away from work that filled them."""
    values = MATRIX["everything"]
    (trigger,) = the(values, "ScaledObject", "-node")["spec"]["triggers"]
    own = the(values, "Deployment", "-proxy")["metadata"]["name"]
    assert trigger["metadata"]["threshold"] == "16", "the run slots of a node"
    waiting = (
        'verbatim_rollouts_waiting{{namespace="{}", pod="{}-6d4cf56db6-{}", priority="{}", runtimes="", cpus="", labels=""}}'
    )
    running = 'verbatim_rollouts_running{{namespace="{}", pod="{}-6d4cf56db6-{}", stage="{}"}}'
    releases = ((NAMESPACE, own, 7), (NAMESPACE, "other-verbatim-proxy", 50), ("elsewhere", own, 90))
    series = [
        {"series": queue.format(namespace, name, pod, by), "values": f"{count}x5"}
        for namespace, name, count in releases
        for pod in ("abcde", "fghij")
        for queue, each in ((waiting, (0, 1)), (running, STAGES))
        for by in each
    ]
    check_query(
        trigger["metadata"]["query"],
        tmp_path,
        (series, 7 * 2 + 7 * 3),
        ([each for each in series if "running" in each["series"]], 7 * 3),
        ([each for each in series if "waiting" in each["series"]], 7 * 2),
        ([], 0),
    )


def test_engines_are_scaled_by_the_calls_that_wait_for_them_or_are_at_them(tmp_path: Path) -> None:
    """Two releases in one namespace, each with two proxies, which show their own calls. Another policy's engines are not the chart's."""
    values = MATRIX["everything"]
    scaled = the(values, "ScaledObject", "-vllm")["spec"]
    (trigger,) = scaled["triggers"]
    assert scaled["scaleTargetRef"] == {
        "apiVersion": "apps/v1",
        "kind": "StatefulSet",
        "name": the(values, "StatefulSet", "-vllm")["metadata"]["name"],
    }
    assert trigger["metadata"]["threshold"] == "48"
    (gauges,) = re.findall('__name__=~"([^"]+)"', trigger["metadata"]["query"])
    replica = SimpleNamespace(name="10.0.0.1:8000", policy="", healthy=True, stalled=False, in_flight=2)
    numbers = EngineNumbers(lambda: [replica], lambda: {"": 3})  # type: ignore[list-item]
    shown = {family.name: family.samples[0].labels for family in numbers.collect()}
    assert all(shown[gauge]["policy"] == "" for gauge in gauges.split("|"))
    own = the(values, "Deployment", "-proxy")["metadata"]["name"]
    series = [
        {
            "series": f'{gauge}{{namespace="{namespace}", pod="{proxy}-6d4cf56db6-{pod}", policy="{policy}", replica="{at}"}}',
            "values": f"{count}x5",
        }
        for namespace, proxy, count in ((NAMESPACE, own, 7), (NAMESPACE, "other-verbatim-proxy", 50), ("elsewhere", own, 90))
        for pod in ("abcde", "fghij")
        for policy in ("", "judge")
        for gauge, at in (
            ("verbatim_engine_queue", ""),
            ("verbatim_engine_calls_in_flight", "10.0.0.1:8000"),
            ("verbatim_engine_calls_in_flight", "10.0.0.2:8000"),
        )
    ]
    check_query(trigger["metadata"]["query"], tmp_path, (series, 2 * 3 * 7), ([], 0))


def check_query(query: str, folder: Path, *cases: tuple[list[dict[str, str]], int]) -> None:
    """Over the series of each case its value."""
    tests = [
        {
            "interval": "1m",
            "input_series": given,
            "promql_expr_test": [{"expr": query, "eval_time": "5m", "exp_samples": [{"labels": "{}", "value": value}]}],
        }
        for given, value in cases
    ]
    case = folder / "case.yaml"
    case.write_text(yaml.safe_dump({"tests": tests}))
    done = promtool("test", "rules", str(case))
    assert done.returncode == 0, done.stdout + done.stderr


def rights() -> set[tuple[str, str]]:
    """What the runtimes ask of a cluster, by the calls in their code; policies are the chart's, and made by nobody else."""
    kinds = {"pod": "pods", "pod_exec": "pods/exec", "network_policy": "networkpolicies"}
    verbs = {"read": "get", "connect_get": "get"}
    calls = re.findall(r"\b(connect_get|[a-z]+)_namespaced_(\w+)", Path(cluster.__file__).read_text())
    asked = {(kinds[kind], verbs.get(verb, verb)) for verb, kind in calls}
    # A list is watched; newer clusters want the right to create for what is asked by GET.
    return asked - {("networkpolicies", "create")} | {("pods", "watch"), ("pods/exec", "create")}


@pytest.mark.parametrize("name", WITH_NODES)
def test_a_node_may_do_to_pods_what_its_runtimes_ask_for_and_no_more(name: str) -> None:
    values = MATRIX[name]
    own = values.get("runtimes", {}).get("namespace") or f"{NAMESPACE}-runtimes"
    (role,) = [each for each in objects(values) if each["kind"] == "Role"]
    assert namespace_of(role) == own
    assert {(kind, verb) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]} == rights()
    (binding,) = [each for each in objects(values) if each["kind"] == "RoleBinding"]
    (subject,) = binding["subjects"]
    bound = (pod_of(the(values, "Deployment", "-node")) or {})["spec"]["serviceAccountName"]
    assert (namespace_of(binding), subject["name"], subject["namespace"]) == (own, bound, NAMESPACE)
    assert not [each for each in objects(values) if each["kind"].startswith("Cluster")]
    (node,) = each_container(values, "node")
    told = environment(node)
    assert told["VERBATIM_KUBERNETES_NAMESPACE"] == own
    the(values, "ServiceAccount", told["VERBATIM_KUBERNETES_SERVICE_ACCOUNT"], own)
    service = the(values, "Service", "-proxy")["metadata"]["name"].upper().replace("-", "_")
    is_ipv6 = values.get("ipFamily") == "IPv6"
    address = "fd00::7" if is_ipv6 else "10.96.1.2"
    for variable, port in (("VERBATIM_URL", 8701), ("VERBATIM_HARNESS_URL", 8700)):
        host = f"$({service}_SERVICE_HOST)"
        assert told[variable] == (f"http://[{host}]:{port}" if is_ipv6 else f"http://{host}:{port}")
        url = urlsplit(told[variable].replace(host, address))
        assert (url.hostname, url.port) == (address, port)


def test_rollouts_stand_where_the_values_say_and_so_does_the_pod_that_tests_their_network() -> None:
    def told(values: Values) -> PodFields:
        (node,) = each_container(values, "node")
        return read_environment(environment(node)).kubernetes_pod_fields

    assert told({}) == PodFields()
    values = MATRIX["everything"]
    wanted = values["runtimes"]
    names = {name: name for name in PodFields.model_json_schema()["properties"]} | {"annotations": "podAnnotations"}
    assert told(values) == PodFields.model_validate({field: wanted[name] for field, name in names.items()})
    test = the(values, "Pod", "-test-network")["spec"]
    assert {name: test[name] for name in ("nodeSelector", "tolerations", "runtimeClassName")} == {
        name: wanted[name] for name in ("nodeSelector", "tolerations", "runtimeClassName")
    }


def test_dashboard_and_alerts_speak_of_metrics_that_there_are() -> None:
    board = json.loads((CHART / "files" / "dashboard.json").read_text())
    alerts = yaml.safe_load((CHART / "files" / "alerts.yaml").read_text())
    text = json.dumps([board, alerts])
    rooms = (CHART.parents[1] / room for room in ("proxy", "rollout", "cli"))
    sources = "".join(file.read_text() for room in rooms for file in room.rglob("*.py"))
    named = {re.sub("_(bucket|count|sum|total)$", "", name) for name in re.findall(r"verbatim_[a-z_]+", text)}
    assert len(named) >= 4
    assert {name for name in named if name not in sources} == set()


def test_the_scripts_need_nothing_but_python() -> None:
    for script in sorted((CHART / "files").glob("*.py")):
        done = subprocess.run(
            [sys.executable, "-I", "-S", "-c", f"compile(open({str(script)!r}).read(), 'x', 'exec')"], check=False
        )
        assert done.returncode == 0
        imported = set(re.findall(r"^(?:import|from) (\w+)", script.read_text(), re.MULTILINE))
        assert imported <= set(sys.stdlib_module_names)
