"""The system calls that no command of a runtime makes, in the two forms that runtimes take: a seccomp program (bubblewrap, steps in
containers) and an OCI profile (container engines, apptainer, clusters). `python -m rollout.runtimes.seccomp` prints the profile.

Refused are the calls that expose more of the kernel to an unprivileged process than programs need: namespaces of its own (in which it would
be root and could mount), mounts, keyrings, bpf, perf, userfaultfd, io_uring, modules, clocks, kernel logs; sockets of families whose other
end is outside the sandbox's network (vsock reaches the machine's host, packet sockets all on the wire) and netlink sockets other than those
that list addresses and routes; files with the set-user-id or set-group-id bit, which would be the node's own user's on the machine;
programs of another architecture; and, in the program, calls newer than this list.
"""

from __future__ import annotations

import errno
import json
import platform
import struct
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the filter's input (`struct seccomp_data`); each argument takes 8 bytes."""
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FAMILIES = (1, 2, 10)
"""AF_UNIX, AF_INET, AF_INET6."""
_NETLINK, _LAST_FAMILY = 16, 64
"""AF_NETLINK, of which only the protocol 0 (NETLINK_ROUTE) is allowed; and a number that no family has reached."""
_SET_ID = 0o6000
"""S_ISUID and S_ISGID."""
_CREATES = 0o20000100
"""O_CREAT and the bit of O_TMPFILE: without either an open has no mode, and its argument may hold anything."""
_MODES = {"chmod": 1, "fchmod": 1, "fchmodat": 2, "fchmodat2": 2, "mknod": 1, "mknodat": 2, "creat": 1}
"""Which argument is the mode. (The kernel itself drops both bits of mkdir.)"""
_OPENS = {"open": 1, "openat": 2}
"""Which argument holds the flags; the mode follows."""
_UNREADABLE = ("clone3", "openat2")
"""What they are asked for is in memory, which a filter cannot read; on ENOSYS libraries fall back to the older call."""
_OF_SET_ID = {*_MODES, *_OPENS, "openat2"}
NEWEST = 462
"""The newest call that this list covers (mseal, Linux 6.10)."""
SEGMENT_BYTES = 1 << 16
"""The largest System V segment if nothing counts shared memory: enough for the lock segments of databases."""

_CALLS = {
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "keyctl": (250, 219),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "syslog": (103, 116),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "clock_settime": (227, 112),
    "settimeofday": (164, 170),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "lookup_dcookie": (212, 18),
    "vhangup": (153, 58),
    "fanotify_init": (300, 262),
    "clone": (56, 220),
    "socket": (41, 198),
    "shmget": (29, 194),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "clone3": (435, 435),
    "openat2": (437, 437),
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
    "fchmodat2": (452, 452),
    "fchmod": (91, 52),
    "fchmodat": (268, 53),
    "openat": (257, 56),
    "mknodat": (259, 33),
}
"""Name -> number on x86-64 and on 64-bit ARM."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`architecture` is the kernel's AUDIT_ARCH_* number; `calls`: name -> number."""

    architecture: int
    calls: Mapping[str, int]


_OF_X86 = {"iopl": 172, "ioperm": 173, "open": 2, "creat": 85, "chmod": 90, "mknod": 133}
MACHINES = {
    "x86_64": Machine(0xC000003E, {**{name: each[0] for name, each in _CALLS.items()}, **_OF_X86}),
    "aarch64": Machine(0xC00000B7, {name: each[1] for name, each in _CALLS.items()}),
}


def find_machine() -> Machine | None:
    """This machine; None if its architecture is not in `MACHINES`."""
    return MACHINES.get(platform.machine())


def compile_filter(machine: Machine, *, shared_memory: bool, set_id: bool = False) -> bytes:
    """The filter, in instructions of 8 bytes. `shared_memory`: System V segments may be of any size. `set_id`: files may get the
    set-user-id and set-group-id bits."""
    words = [
        _instruction(_LOAD, _ARCHITECTURE),
        *_unless(_EQUAL, machine.architecture, [_instruction(_RETURN, _KILL)]),
        _instruction(_LOAD, _NUMBER),
        *_if(_GREATER, NEWEST, [_refuse(errno.ENOSYS)]),
    ]
    for name, number in machine.calls.items():
        if set_id and name in _OF_SET_ID:
            continue
        words += _if(_EQUAL, number, _make_verdict(name, shared_memory))
    return b"".join((*words, _instruction(_RETURN, _ALLOW)))


def _make_verdict(name: str, shared_memory: bool) -> Sequence[bytes]:
    """The instructions for a call of that name. They end in a return."""
    allowed = _instruction(_RETURN, _ALLOW)
    if name == "clone":
        return [_load_argument(0), *_if(_ANY_BIT, _NEW_NAMESPACES, [_refuse(errno.EPERM)]), allowed]
    if name in _UNREADABLE:
        return [_refuse(errno.ENOSYS)]
    if name in _MODES:
        return [_load_argument(_MODES[name]), *_if(_ANY_BIT, _SET_ID, [_refuse(errno.EPERM)]), allowed]
    if name in _OPENS:
        flags = _OPENS[name]
        mode = [_load_argument(flags + 1), *_if(_ANY_BIT, _SET_ID, [_refuse(errno.EPERM)])]
        return [_load_argument(flags), *_if(_ANY_BIT, _CREATES, mode), allowed]
    if name == "socket":
        known = [word for family in _FAMILIES for word in _if(_EQUAL, family, [allowed])]
        netlink = [_load_argument(2), *_if(_EQUAL, 0, [allowed]), _refuse(errno.EPROTONOSUPPORT)]
        return [_load_argument(0), *known, *_if(_EQUAL, _NETLINK, netlink), _refuse(errno.EAFNOSUPPORT)]
    if name == "shmget":
        too_large = [_refuse(errno.ENOMEM)]
        bounded = [
            _load_argument(1, high=True),
            *_if(_GREATER, 0, too_large),
            _load_argument(1),
            *_if(_GREATER, SEGMENT_BYTES, too_large),
        ]
        return [allowed] if shared_memory else [*bounded, allowed]
    return [_refuse(errno.EPERM)]


def render_profile(*, clone3: bool = False, set_id: bool = False) -> str:
    """The same as an OCI profile (JSON), for any machine: engines know the numbers of calls by their names. It does not refuse calls newer
    than the list, which an engine may not know by name, and leaves shared memory to the engine's limits. `set_id` as in `compile_filter`.
    `clone3`: that call is allowed, for an engine that answers EPERM whatever a rule says, on which no library falls back; namespaces must
    then be forbidden by other means."""
    unreadable = {*_UNREADABLE} - ({"clone3"} if clone3 else set()) - (_OF_SET_ID if set_id else set())
    names = {*_CALLS, *_OF_X86}
    conditional = {"clone", "socket", "shmget", *_MODES, *_OPENS}
    rules = [_rule(sorted(names - conditional - {*_UNREADABLE}), errno.EPERM), _rule(sorted(unreadable), errno.ENOSYS)]
    rules += [_rule(["clone"], errno.EPERM, _bit(0, bit)) for bit in _split(_NEW_NAMESPACES)]
    for bit in () if set_id else _split(_SET_ID):
        rules += [_rule([name], errno.EPERM, _bit(mode, bit)) for name, mode in _MODES.items()]
        for name, flags in _OPENS.items():
            rules += [_rule([name], errno.EPERM, _bit(flags, creates), _bit(flags + 1, bit)) for creates in _split(_CREATES)]
    others = [each for each in range(_LAST_FAMILY) if each not in (*_FAMILIES, _NETLINK)]
    rules += [_rule(["socket"], errno.EAFNOSUPPORT, _compare(0, each, "EQ")) for each in others]
    rules.append(_rule(["socket"], errno.EAFNOSUPPORT, _compare(0, _LAST_FAMILY, "GE")))
    rules.append(_rule(["socket"], errno.EPROTONOSUPPORT, _compare(0, _NETLINK, "EQ"), _compare(2, 0, "NE")))
    return json.dumps({"defaultAction": "SCMP_ACT_ALLOW", "syscalls": rules}, indent=1)


def _rule(names: Sequence[str], number: int, *conditions: Mapping[str, Any]) -> dict[str, Any]:
    return {"names": list(names), "action": "SCMP_ACT_ERRNO", "errnoRet": number, "args": list(conditions)}


def _bit(index: int, bit: int) -> dict[str, Any]:
    return {"index": index, "value": bit, "valueTwo": bit, "op": "SCMP_CMP_MASKED_EQ"}


def _compare(index: int, value: int, how: str) -> dict[str, Any]:
    return {"index": index, "value": value, "op": f"SCMP_CMP_{how}"}


def _split(bits: int) -> list[int]:
    return [1 << each for each in range(bits.bit_length()) if bits >> each & 1]


def _load_argument(index: int, *, high: bool = False) -> bytes:
    """Loads its low half, or its high one."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * index + 4 * high)


def _refuse(number: int) -> bytes:
    return _instruction(_RETURN, _REFUSE | number)


def _if(test: int, value: int, then: Sequence[bytes]) -> list[bytes]:
    return [_instruction(test, value, otherwise=len(then)), *then]


def _unless(test: int, value: int, then: Sequence[bytes]) -> list[bytes]:
    return [_instruction(test, value, met=len(then)), *then]


def _instruction(code: int, value: int, *, met: int = 0, otherwise: int = 0) -> bytes:
    """`met` and `otherwise` are the numbers of following instructions to skip (`struct sock_filter`)."""
    return struct.pack("HBBI", code, met, otherwise, value)


if __name__ == "__main__":
    sys.stdout.write(render_profile() + "\n")
