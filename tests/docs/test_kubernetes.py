"""What docs/deploy.md and deploy/kubernetes put before the service and beside it: real nginx and real Lua find a request's session."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import helm_python
import httpx
import yaml
from lupa import LuaRuntime

from examples.vllm_server import vllm_command
from proxy.auth import mint_key
from proxy.metrics import Metrics
from tests.support.documents.helm_chart import CHART, objects, rendered, the
from tests.support.machine import require
from tests.support.service.verbatim_process import wait_until

PAGE = (CHART.parents[1] / "docs" / "deploy.md").read_text().partition("\n## On Kubernetes\n")[2]
SESSION = "run-7.a_b"
KEY = mint_key(SESSION)[0]
REQUESTS: list[tuple[str, dict[str, str], str | None]] = [
    (f"/s/{SESSION}/v1/chat/completions", {"authorization": "Bearer whatever"}, SESSION),
    (f"/s/{SESSION}/v1beta/models/policy:generateContent?key={KEY}", {}, SESSION),
    (f"/sessions/{SESSION}/close", {"authorization": "Bearer admin"}, SESSION),
    ("/v1/chat/completions", {"authorization": f"Bearer {KEY}"}, SESSION),
    ("/v1/messages", {"x-api-key": KEY}, SESSION),
    ("/v1beta/models/policy:generateContent", {"x-goog-api-key": KEY}, SESSION),
    (f"/v1beta/models/policy:generateContent?alt=sse&key={KEY}", {}, SESSION),
    ("/sessions", {"authorization": "Bearer admin"}, None),
    ("/batches/lease", {"authorization": "Bearer trainer"}, None),
]
"""Path, headers, and whose request it is."""
NGINX = """
daemon off; pid {folder}/nginx.pid; error_log stderr crit; {user}
events {{ }}
http {{
  access_log off; client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  {maps}
  server {{ listen unix:{folder}/socket; location / {{ return 200 "$verbatim_session $request_id"; }} }}
}}
"""


FILES = CHART.parents[1] / "deploy" / "kubernetes"


def documents(*names: str) -> dict[str, Any]:
    """By kind; values of a chart have none."""
    return {each.get("kind", ""): each for name in names for each in yaml.safe_load_all((FILES / name).read_text())}


def test_nginx_sends_by_the_session(tmp_path: Path) -> None:
    binary = require("nginx")
    user = "user root;" if os.geteuid() == 0 else ""
    configuration = tmp_path / "nginx.conf"
    configuration.write_text(NGINX.format(folder=tmp_path, user=user, maps=(FILES / "session.nginx.conf").read_text()))
    server = subprocess.Popen([binary, "-e", "stderr", "-c", str(configuration)])
    try:
        wait_until(lambda: server.poll() is not None or (tmp_path / "socket").exists(), 60, "nginx")
        # The socket is there a moment before nginx listens.
        transport = httpx.HTTPTransport(uds=str(tmp_path / "socket"), retries=5)
        with httpx.Client(transport=transport, base_url="http://nginx") as client:
            for path, headers, wanted in REQUESTS:
                by, any_one = client.get(path, headers=headers).text.split()
                assert by == (wanted or any_one), path
    finally:
        server.terminate()
        server.wait(60)


def test_envoy_sends_by_the_session_and_by_no_header_of_a_client() -> None:
    lua = LuaRuntime()
    lua.execute(documents("envoy-gateway.yaml")["EnvoyExtensionPolicy"]["spec"]["lua"][0]["inline"])
    # As Envoy gives them: a method for each, and nothing for a header that is not there.
    handle = lua.eval("""function(given)
      local headers = {}
      function headers.get(self, name) return given[name] end
      function headers.add(self, name, value) given[name] = value end
      function headers.remove(self, name) given[name] = nil end
      return {headers = function(self) return headers end}
    end""")
    for path, headers, wanted in REQUESTS:
        given = lua.table_from({":path": path, "x-verbatim-session": "forged", **headers})
        lua.globals().envoy_on_request(handle(given))
        assert given["x-verbatim-session"] == wanted, path
    balancer = documents("envoy-gateway.yaml")["BackendTrafficPolicy"]["spec"]["loadBalancer"]
    assert balancer["consistentHash"] == {"type": "Header", "header": {"name": "x-verbatim-session"}}


def test_envoys_objects_are_about_the_charts_route() -> None:
    found = documents("envoy-gateway.yaml")
    with helm_python.Chart.load(CHART) as chart:
        values = {"httpRoute": {"enabled": True, "parentRefs": [{"name": "gateway"}]}, "networkPolicy": {"enabled": False}}
        texts = chart.render(values, name="verbatim", namespace="rl")
    route = yaml.safe_load(texts["verbatim/templates/httproute.yaml"])
    assert found.keys() == {"BackendTrafficPolicy", "EnvoyExtensionPolicy"}
    for each in found.values():
        assert each["metadata"]["namespace"] == "rl"
        assert each["spec"]["targetRefs"] == [
            {"group": "gateway.networking.k8s.io", "kind": route["kind"], "name": route["metadata"]["name"]}
        ]


def test_the_production_stacks_engines_are_started_as_verbatim_starts_its_own() -> None:
    found = documents("production-stack.yaml", "policy-replicas.yaml")
    (model,) = found[""]["servingEngineSpec"]["modelSpec"]
    argv, _ = vllm_command(model["modelURL"], 8000, device="gpu")
    told = {flag.partition("=")[0] for flag in model["vllmConfig"]["extraArgs"]}
    of_the_stack = {"--model", "--host", "--port", "--max-model-len", "--enable-auto-tool-choice", "--tool-call-parser"}
    assert {flag for flag in argv if flag.startswith("--")} - of_the_stack == told
    assert model["enableTool"] and model["toolCallParser"] and model["vllmConfig"]["maxModelLen"]
    service = found["Service"]["spec"]
    assert service["clusterIP"] == "None" and service["selector"]["model"] == model["name"]


def test_the_adapters_rule_names_a_metric_that_there_is() -> None:
    (rule,) = documents("prometheus-adapter.yaml")[""]["rules"]["custom"]
    assert rule["seriesQuery"].partition("{")[0] + " " in Metrics().page().decode()


def test_the_ingress_sends_by_what_the_page_says() -> None:
    """By the path as it comes, or by the variable that the snippet makes."""
    for hash_by in ("$request_uri", "$verbatim_session", ""):
        values = {"ingress": {"enabled": True, "host": "a.example.com", "hashBy": hash_by}}
        told = the(values, "Ingress", "verbatim")["metadata"]["annotations"]
        assert told.get("nginx.ingress.kubernetes.io/upstream-hash-by", "") == hash_by
    default = the({"ingress": {"enabled": True, "host": "a.example.com"}}, "Ingress", "verbatim")["metadata"]["annotations"]
    assert f"`ingress.hashBy: {default['nginx.ingress.kubernetes.io/upstream-hash-by']}`" in PAGE
    assert "map $verbatim_path $verbatim_session" in (FILES / "session.nginx.conf").read_text()


def test_every_value_that_the_page_names_is_one_of_the_chart() -> None:
    """With `--set`, in a sentence, or in the blocks of values."""
    chart = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = json.loads((CHART / "values.schema.json").read_text())
    flags = re.findall(r"--set(?:-string)? ([\w.]+)=", PAGE)
    named = sorted({*flags, *re.findall(rf"`((?:{'|'.join(chart)})(?:\.\w+)+)[`=:]", PAGE)})
    assert len(named) > 25
    for name in named:
        found: Any = schema
        for word in name.split("."):
            if found.get("$ref", "").startswith("#/definitions/"):
                break  # of Kubernetes' own
            free = found.get("additionalProperties", True)
            found = found["properties"][word] if word in found.get("properties", {}) else free
            assert found, name
            if found is True:
                break
    (shown,) = [each for each in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "proxyFrom" in each]
    rendered({"networkPolicy": yaml.safe_load(shown)["networkPolicy"]})


def test_the_values_that_make_the_service_reachable_render_and_serve_what_the_page_asks_for() -> None:
    shown = [each for each in re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL) if "ingress:" in each]
    values, platform = map(yaml.safe_load, shown)
    (rule,) = the(values, "Ingress", "verbatim")["spec"]["rules"]
    assert values["proxy"]["publicUrl"] == f"https://{rule['host']}" and f"`https://{rule['host']}/healthz`" in PAGE
    assert {"/healthz", "/sessions", "/s"} <= {each["path"] for each in rule["http"]["paths"]}
    assert [each["host"] for each in the(platform, "Ingress", "verbatim")["spec"]["rules"]] == [rule["host"]]
    assert {each["kind"] for each in objects(platform)} >= {"ServiceMonitor", "NetworkPolicy"}
    text = "".join(rendered(platform).values())
    assert "claimName: models" in text and "claimName: weights" in text and "rediss://" in text
    assert not re.search("runAsUser: [0-9]|fsGroup: [0-9]|kind: PersistentVolumeClaim", text)
