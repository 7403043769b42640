"""Faults in what both sides of the HTTP API share: the loader of plug-ins and the client."""

from __future__ import annotations

from tests.mutants.fault import Fault

_CLIENT = "tests/contract/test_client.py"
_PLUGINS = "tests/contract/test_plugins.py -k 'not does_not_start'"

FAULTS = (
    Fault(
        "A package takes the place of a built-in dialect, engine, evaluator or runtime.",
        "        if other.value != point.value:\n",
        "        if other.value != point.value and other.dist is not None:\n",
        _PLUGINS,
    ),
    Fault(
        "A push that may have begun is begun again.",
        "    return error.status == 503 or (isinstance(error, NoAnswer) and not error.lost)\n",
        "    return error.status == 503 or isinstance(error, NoAnswer)\n",
        _CLIENT,
    ),
    Fault(
        "A request that a gateway gave up on passes for one that nobody carried out.",
        "        lost=issubclass(kind, ServiceUnavailable),\n",
        "        lost=False,\n",
        _CLIENT,
    ),
    Fault(
        "A client waits beyond the time it may retry.",
        "        if now - self._failed_at + pause >= self._retry_seconds or",
        "        if now - self._failed_at >= self._retry_seconds or",
        _CLIENT,
    ),
    Fault(
        "A node whose session was held back for long gives up at the first failure after that.",
        "            self._failed_at = None\n            return hold",
        "            return hold",
        _CLIENT,
    ),
)
