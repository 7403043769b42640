"""httpx's functions for servers without TLS: they do not read the system's certificates, which takes 50 ms per request."""

from __future__ import annotations

from functools import partial

import httpx

request = partial(httpx.request, verify=False, timeout=120)
get = partial(httpx.get, verify=False, timeout=120)
head = partial(httpx.head, verify=False, timeout=120)
post = partial(httpx.post, verify=False, timeout=120)
