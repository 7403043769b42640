"""Which system calls a command in a sandbox may make: a filter for the kernel, as bubblewrap takes it.

All but those by which an unprivileged process gets at more of the kernel than programs need: namespaces of its own (in which it would
be root and could mount), mounts, keyrings, bpf, perf, userfaultfd, io_uring, modules, clocks, kernel logs; sockets of families whose
other end is not in the sandbox's network (vsock reaches the machine's host); programs of another architecture; and calls newer than this
list. The container engines' own filters leave out the same.
"""

from __future__ import annotations

import errno
import platform
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

_LOAD, _EQUAL, _GREATER, _ANY_BIT, _RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
_NUMBER, _ARCHITECTURE, _ARGUMENTS = 0, 4, 16
"""Where they are in what the filter is given (`struct seccomp_data`); arguments are of 8 bytes."""
_ALLOW, _KILL, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000
_NEW_NAMESPACES = 0x7E020000
"""CLONE_NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID and NEWNET."""
_FAMILIES = (1, 2, 10, 16)
"""AF_UNIX, AF_INET, AF_INET6, AF_NETLINK."""
NEWEST = 462
"""The last call that this list knows (mseal, Linux 6.10)."""
SEGMENT_BYTES = 1 << 16
"""Of System V's shared memory, where nothing counts it: enough for what databases lock themselves with."""

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
"""Name -> number on x86-64, and on 64-bit ARM."""


@dataclass(frozen=True, slots=True)
class Machine:
    """`architecture` as the kernel says it to a filter (AUDIT_ARCH_*); `calls`: name -> number."""

    architecture: int
    calls: Mapping[str, int]


MACHINES = {
    "x86_64": Machine(0xC000003E, {**{name: each[0] for name, each in _CALLS.items()}, "iopl": 172, "ioperm": 173}),
    "aarch64": Machine(0xC00000B7, {name: each[1] for name, each in _CALLS.items()}),
}


def own() -> Machine | None:
    """This one; None where its calls are not known here."""
    return MACHINES.get(platform.machine())


def compiled(machine: Machine, *, shared_memory: bool) -> bytes:
    """The filter, as instructions of 8 bytes. `shared_memory`: segments of System V may be as great as they like."""
    words = [
        _instruction(_LOAD, _ARCHITECTURE),
        *_unless(_EQUAL, machine.architecture, [_instruction(_RETURN, _KILL)]),
        _instruction(_LOAD, _NUMBER),
        *_when(_GREATER, NEWEST, [_refused(errno.ENOSYS)]),
    ]
    for name, number in machine.calls.items():
        words += _when(_EQUAL, number, _answer(name, shared_memory))
    return b"".join((*words, _instruction(_RETURN, _ALLOW)))


def _answer(name: str, shared_memory: bool) -> Sequence[bytes]:
    """To a call of that name. Ends in a return."""
    allowed = _instruction(_RETURN, _ALLOW)
    if name == "clone":
        return [_argument(0), *_when(_ANY_BIT, _NEW_NAMESPACES, [_refused(errno.EPERM)]), allowed]
    if name == "clone3":
        # Its flags are in memory, which no filter reads; libraries then use clone.
        return [_refused(errno.ENOSYS)]
    if name == "socket":
        known = [word for family in _FAMILIES for word in _when(_EQUAL, family, [allowed])]
        return [_argument(0), *known, _refused(errno.EAFNOSUPPORT)]
    if name == "shmget":
        too_great = [_refused(errno.ENOMEM)]
        whole = [
            _argument(1, high=True),
            *_when(_GREATER, 0, too_great),
            _argument(1),
            *_when(_GREATER, SEGMENT_BYTES, too_great),
        ]
        return [allowed] if shared_memory else [*whole, allowed]
    return [_refused(errno.EPERM)]


def _argument(index: int, *, high: bool = False) -> bytes:
    """Loads its lower half, or its higher one."""
    return _instruction(_LOAD, _ARGUMENTS + 8 * index + 4 * high)


def _refused(number: int) -> bytes:
    return _instruction(_RETURN, _REFUSE | number)


def _when(test: int, value: int, then: Sequence[bytes]) -> list[bytes]:
    return [_instruction(test, value, otherwise=len(then)), *then]


def _unless(test: int, value: int, then: Sequence[bytes]) -> list[bytes]:
    return [_instruction(test, value, met=len(then)), *then]


def _instruction(code: int, value: int, *, met: int = 0, otherwise: int = 0) -> bytes:
    """`met` and `otherwise` are how many of the next ones are left out (`struct sock_filter`)."""
    return struct.pack("HBBI", code, met, otherwise, value)
