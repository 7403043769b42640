"""Exit code 0 when the service lists this node, and heard from it lately. Reads the node's own variables; needs nothing but Python."""

import json
import os
import sys
import urllib.request

SILENT_SECONDS = 60.0


def find_silence(nodes: list[dict], name: str) -> float:
    """How long the node of that name has been silent, in seconds by the service's account; infinite for one that is not there."""
    return min((node["silent_seconds"] for node in nodes if node["name"] == name), default=float("inf"))


def main() -> str | None:
    """What is wrong."""
    url, name = os.environ["VERBATIM_URL"].rstrip("/") + "/nodes", os.environ["VERBATIM_NODE_NAME"]
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {os.environ['VERBATIM_NODE_TOKEN'].strip()}"})
    try:
        with urllib.request.urlopen(request, timeout=10) as response:
            nodes = json.load(response)["nodes"]
    except OSError as error:
        return f"{url}: {error}"
    silent = find_silence(nodes, name)
    return None if silent <= SILENT_SECONDS else f"{url} has not heard of the node {name} for {silent:.0f} seconds"


if __name__ == "__main__":
    sys.exit(main())
