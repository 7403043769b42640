"""What a request could make an engine reach out to: media named by address, and other engines.

This service fetches nothing that a caller names. An engine would, from a network that the harness may not reach: media on the chat
path, so they are taken by address only where the operator says so (`remote_media`), and caches of other engines, which are the
operator's to join.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from proxy.dialects.base import Request
from proxy.errors import RequestError

TRANSFERS = ("kv_transfer_params", "ec_transfer_params")
"""Fields of vLLM that name a host and port to fetch a cache from."""


def refuse_transfers(request: Request) -> None:
    """Raise RequestError when the request names an engine to fetch from."""
    for name in TRANSFERS:
        if name in request.forward:
            raise RequestError(f"'{name}' is not taken from a harness", param=name)


def refuse_remote_media(request: Request) -> None:
    """Raise RequestError when a message names media by anything but a data URL."""
    for message in request.messages:
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            if isinstance(part, dict):
                _refuse_address(part)


def _refuse_address(part: Mapping[str, Any]) -> None:
    for name, value in part.items():
        if not name.endswith("url"):
            continue
        address = value.get("url") if isinstance(value, dict) else value
        if isinstance(address, str) and address[:5].lower() != "data:":
            raise RequestError(
                f"a message names its {name.removesuffix('_url')} by address; here media are taken as data URLs only",
                param="messages",
            )
