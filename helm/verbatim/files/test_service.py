"""`helm test`: the service is ready, and a session can be opened, used for what needs no tokens, and deleted."""

import json
import os
import sys
import urllib.request

URL = os.environ["VERBATIM_URL"].rstrip("/")
HARNESS_URL = os.environ["VERBATIM_HARNESS_URL"].rstrip("/")


def ask(method: str, path: str, token: str = "", body: dict | None = None) -> dict:
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {token}"} if token else {})
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(
        (HARNESS_URL if path.startswith("/s/") else URL) + path, data=data, headers=headers, method=method
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        said = response.read()
    print(f"{method} {path}: {response.status}", flush=True)
    return json.loads(said) if said else {}


def main() -> None:
    """Raises what is wrong."""
    # The Secret has the admin's tokens as the service reads them: one a line.
    lines = (line.strip() for line in os.environ["VERBATIM_ADMIN_TOKEN"].splitlines())
    token = next((line for line in lines if line and not line.startswith("#")), "")
    ask("GET", "/healthz")
    ask("GET", "/readyz")
    session = ask("POST", "/sessions", token, {"metadata": {"opened_by": "helm test"}})
    name, key = session["session_id"], session["api_key"]
    try:
        models = ask("GET", f"/s/{name}/v1/models", key)
        print(f"serves {', '.join(model['id'] for model in models['data'])}", flush=True)
    finally:
        ask("DELETE", f"/sessions/{name}", token)


if __name__ == "__main__":
    try:
        main()
    except (OSError, KeyError) as error:
        # Of an HTTP error what the service said, too.
        said = error.read().decode(errors="replace") if hasattr(error, "read") else ""
        sys.exit(f"{URL}: {error!r} {said}")
