"""`helm test`, as a pod of a rollout: the cluster's network carries NetworkPolicies out. Fails when anything beside the proxy answers."""

import os
import socket
import sys

SECONDS = 5.0


def answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), SECONDS):
            return True
    except OSError:
        return False


def main() -> str | None:
    """What is open that should not be. The API server's address is in every pod's variables and answers whoever reaches it."""
    host, port = os.environ["KUBERNETES_SERVICE_HOST"], int(os.environ["KUBERNETES_SERVICE_PORT"])
    if answers(host, port):
        return f"a pod of a rollout reaches the API server at {host}:{port}: the network of this cluster does not carry policies out"
    print(f"a pod of a rollout does not reach {host}:{port}", flush=True)
    return None


if __name__ == "__main__":
    sys.exit(main())
