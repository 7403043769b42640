"""nginx as the upstream that costs next to nothing, answering in vLLM's shapes from files, and as the proxy that reads nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.cores import Side
from benchmarks.processes import Started, free_port, started, wait_for_port
from proxy.engine.in_vllm.frames import ROUTE, SAMPLE

WITH_PLUGIN = "/plugin"
"""Below this path of the upstream stands the same engine with the plugin inside it."""

_ROUTES = {
    "/v1/chat/completions": "chat",
    "/v1/chat/completions/render": "render",
    "/inference/v1/generate": "generate",
    "/v1/chat/completions/derender": "derender",
    f"{WITH_PLUGIN}{SAMPLE}": "sample",
}

_FRAME = """
daemon off; worker_processes 1; pid {folder}/nginx.pid; error_log stderr crit; worker_rlimit_nofile 8192; {user}
events {{ worker_connections 4096; }}
http {{
  access_log off; client_max_body_size 0; client_body_buffer_size 4m; tcp_nodelay on; sendfile on;
  keepalive_requests 1000000000; keepalive_timeout 600s; open_file_cache max=100; default_type application/json;
  types {{ application/json json; text/event-stream sse; }}
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy; fastcgi_temp_path {folder}/fastcgi;
  uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  {http}
}}
"""
# A file is given to GET only, and an error's page is always asked for with GET. A service that looks for routes posts a byte or two, and
# takes the plugin for there if it is refused in vLLM's words.
_ROUTE = """
    location = {path} {{
      if ($content_length ~ "^[12]$") {{ return 400 '{{"error":{{"code":400}}}}'; }}
      error_page 418 =200 /{file}; return 418;
    }}"""
_UPSTREAM = """
  server {{
    listen 127.0.0.1:{port} backlog=4096; root {folder};{routes}
    location = /v1/models {{ try_files /models.json =404; }}
    location = /health {{ return 200; }}
    location = {plugin}{about} {{ try_files /about.json =404; }}
    location {plugin}/ {{ rewrite ^{plugin}(/.*)$ $1 last; }}
  }}"""
_PASSING = """
  upstream engine {{ server {engine}; keepalive 512; keepalive_requests 1000000000; }}
  server {{
    listen 127.0.0.1:{port} backlog=4096;
    location / {{
      proxy_pass http://engine; proxy_http_version 1.1; proxy_set_header Connection ""; proxy_buffers 64 64k; proxy_buffer_size 64k;
      proxy_busy_buffers_size 128k; proxy_read_timeout 600s; proxy_buffering {buffering};
    }}
  }}"""


@contextmanager
def upstream(answers: Mapping[str, bytes], folder: Path, side: Side = "load") -> Iterator[str]:
    """URL of an engine that gives these answers."""
    folder.mkdir(parents=True)
    for name, content in answers.items():
        (folder / name).write_bytes(content)
    files = {name.partition(".")[0]: name for name in answers}
    routes = "".join(_ROUTE.format(path=path, file=files[answer]) for path, answer in _ROUTES.items() if answer in files)
    port = free_port()
    with _serving(
        folder, port, _UPSTREAM.format(port=port, folder=folder, routes=routes, plugin=WITH_PLUGIN, about=ROUTE), side
    ):
        yield f"http://127.0.0.1:{port}"


@contextmanager
def passing(engine_url: str, folder: Path, side: Side = "tested", *, at_once: bool = False) -> Iterator[tuple[Started, str]]:
    """The process and URL of an nginx that hands everything on to the engine; `at_once`: what is streamed, as it comes."""
    folder.mkdir(parents=True)
    port = free_port()
    engine = engine_url.removeprefix("http://")
    http = _PASSING.format(port=port, engine=engine, buffering="off" if at_once else "on")
    with _serving(folder, port, http, side) as process:
        yield process, f"http://127.0.0.1:{port}"


@contextmanager
def _serving(folder: Path, port: int, http: str, side: Side) -> Iterator[Started]:
    binary = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
    if binary is None:
        raise SystemExit("nginx is missing: `make bench` installs it (Debian package nginx-light)")
    # Workers of a master that is root give up its rights and could not read a private folder.
    user = "user root;" if folder.owner() == "root" else ""
    configuration = folder / "nginx.conf"
    configuration.write_text(_FRAME.format(folder=folder, user=user, http=http))
    with started([binary, "-e", "stderr", "-c", str(configuration)], side=side) as process:
        wait_for_port(port)
        yield process
