"""A proxy that lets nothing through and notes who asked for what: agents under test talk to this machine alone."""

from __future__ import annotations

import contextlib
import socket
import threading
from typing import Self


class Outside:
    """Used in a `with` block; `asked` are the first lines of what was refused, such as `CONNECT registry:443 HTTP/1.1`."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._refuse_all, name="outside")

    @property
    def variables(self) -> dict[str, str]:
        """What sends a well-behaved program here for everything that is not on this machine."""
        near = "127.0.0.1,localhost"
        names = ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")
        return {**dict.fromkeys(names, self.url), "no_proxy": near, "NO_PROXY": near}

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)
        self._listener.close()

    def _refuse_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError):
                connection.settimeout(5)
                self.asked.append(connection.recv(4096).partition(b"\r\n")[0].decode("latin-1"))
                connection.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
