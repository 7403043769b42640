"""The system call filter of a sandbox: a seccomp program, as bubblewrap takes it.

It refuses the calls that expose more of the kernel to an unprivileged process than programs need: namespaces of its own (in which it would
be root and could mount), mounts, keyrings, bpf, perf, userfaultfd, io_uring, modules, clocks, kernel logs; sockets of families whose other
end is outside the sandbox's network (vsock reaches the machine's host); programs of another architecture; and calls newer than this list.
The container engines' own filters refuse the same.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Offsets in the filter's input (`struct seccomp_data`); each argument takes 8 bytes."""
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
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
    "mount_setattr": (442, 442),
    "quotactl_fd": (443, 443),
    "memfd_secret": (447, 447),
}
"""Name -> number on x86-64 and on 64-bit ARM."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`architecture` is the kernel's AUDIT_ARCH_* number; `calls`: name -> number."""

    architecture: int
    calls: Mapping[str, int]


MACHINES = {
    "x86_64": Machine(0xC000003E, {**{name: each[0] for name, each in _CALLS.items()}, "iopl": 172, "ioperm": 173}),
    "aarch64": Machine(0xC00000B7, {name: each[1] for name, each in _CALLS.items()}),
}


def find_machine() -> Machine | None:
    """This machine; None if its architecture is not in `MACHINES`."""
    return MACHINES.get(platform.machine())


def compile_filter(machine: Machine, *, shared_memory: bool) -> bytes:
    """The filter, in instructions of 8 bytes. `shared_memory`: System V segments may be of any size."""
    words = [
        _instruction(_LOAD, _ARCHITECTURE),
        *_unless(_EQUAL, machine.architecture, [_instruction(_RETURN, _KILL)]),
        _instruction(_LOAD, _NUMBER),
        *_if(_GREATER, NEWEST, [_refuse(errno.ENOSYS)]),
    ]
    for name, number in machine.calls.items():
        words += _if(_EQUAL, number, _make_verdict(name, shared_memory))
    return b"".join((*words, _instruction(_RETURN, _ALLOW)))


def _make_verdict(name: str, shared_memory: bool) -> Sequence[bytes]:
    """The instructions for a call of that name. They end in a return."""
    allowed = _instruction(_RETURN, _ALLOW)
    if name == "clone":
        return [_load_argument(0), *_if(_ANY_BIT, _NEW_NAMESPACES, [_refuse(errno.EPERM)]), allowed]
    if name == "clone3":
        # Its flags are in memory, which a filter cannot read; on ENOSYS libraries fall back to clone.
        return [_refuse(errno.ENOSYS)]
    if name == "socket":
        known = [word for family in _FAMILIES for word in _if(_EQUAL, family, [allowed])]
        return [_load_argument(0), *known, _refuse(errno.EAFNOSUPPORT)]
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
