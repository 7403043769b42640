"""Faults of what a session remembers of its last bodies: one for each argument why that changes no token."""

from __future__ import annotations

from tests.mutants.fault import Fault

_BYTES = "tests/proxy/dialects/test_raw_history.py"
_REQUESTS = "tests/proxy/call/test_memo.py"

FAULTS = (
    Fault(
        "The beginning of a longer number counts as an item that is known.",
        '    if text[:1] != b",":\n        return None\n',
        "",
        _BYTES,
    ),
    Fault(
        "A body that ends otherwise than the known one is read with that one's fields.",
        " or not body.endswith(view[before.tail :]):\n",
        ":\n",
        _BYTES,
    ),
    Fault(
        "A body that begins otherwise than the known one is read with that one's history.",
        "    if tail < end or not body.startswith(view[:end]) or",
        "    if tail < end or",
        _BYTES,
    ),
    Fault(
        "What closes the list and opens another field counts as more items.",
        '        new = _LIST.decode(b"[%b]" % text[1:])\n',
        '        new = _LIST.decode(b"[%b]" % text[1:].partition(b"]")[0])\n',
        _BYTES,
    ),
    Fault(
        "Tools as long as the known ones are taken for them.",
        "            if to - at == len(text) and before.body[at:to] == text:\n",
        "            if to - at == len(text):\n",
        _BYTES,
    ),
    Fault(
        "What other tools were converted to is offered to the model.",
        "            if value is given and by is convert:\n",
        "            if by is convert:\n",
        _REQUESTS,
    ),
    Fault(
        "Tools are told apart by nothing but that there are some: the root is that of others.",
        "        if tools is not offered[0]:\n",
        "        if not offered[0]:\n",
        _REQUESTS + " tests/proxy/call/test_session.py -k 'without or own_tools'",
    ),
    Fault(
        "A history that grows turn by turn may hold more values than one that comes at once.",
        "        if values > MAX_VALUES:\n            return None\n",
        "",
        _BYTES + " -k 'beyond_a_bound'",
    ),
    Fault(
        "What one dialect read is taken by another, where the same bytes mean something else.",
        "        return [memo for memo in self._kept if memo.divide is divide]\n",
        "        return list(self._kept)\n",
        _REQUESTS + " -k 'another'",
    ),
    Fault(
        "A request that was refused or not recorded is remembered.",
        "        self._read = divide, split, reading\n",
        "        self._read = divide, split, reading\n        self.session.memos.keep(*self._read)\n",
        _REQUESTS + " -k 'not_recorded'",
    ),
    Fault(
        "A response that follows a turn of the model, which was read before it came, is none of that turn.",
        "        fresh = is_models[start] or not after_model\n",
        "        fresh = True\n",
        _REQUESTS + " -k 'without and gemini'",
    ),
    Fault(
        "Further items of a reply that was read before they came make a reply of their own.",
        ' kind == "message" or (kind == "output" and reply is None)))\n',
        " True))\n",
        _REQUESTS + " -k 'without and responses'",
    ),
    Fault(
        "A later system message counts as the prompt's after the messages before it were remembered.",
        "            yield Unit(at, item, None if leads else read, not is_system)\n",
        "            yield Unit(at, item, None if leads else read)\n",
        _REQUESTS + " -k 'without and messages'",
    ),
    Fault(
        "What followed the items that a request shares with the last one is taken over, too.",
        "memo.reading.up_to(split.known)\n",
        "memo.reading.up_to(len(memo.raw))\n",
        _REQUESTS,
    ),
    Fault(
        "A history that is edited in the middle keeps the fingerprints of the one that was not.",
        "    return next(at for at, (one, other) in enumerate(zip_longest(history, known)) if one is not other)\n",
        "    return min(len(history), len(known))\n",
        "tests/proxy/call/test_session.py -k 'whatever_came_before'",
    ),
    Fault(
        "The fingerprints of a history are kept though a call that it names was not known.",
        "        if chained.settled and chained not in self._chains:\n",
        "        if chained not in self._chains:\n",
        "tests/proxy/call/test_session.py -k 'another_process'",
    ),
)
