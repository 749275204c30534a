"""System calls that a sandboxed program has no use for, refused by a filter in the kernel.

A filter is a program for the kernel's classic BPF machine: four instructions of (code, jump if true, jump if false,
constant). Ours is a list of questions over the call's number and arguments:

    another architecture        -> the process is killed
    a call of the list          -> EPERM
    clone with a namespace flag -> EPERM
    clone3                      -> ENOSYS, so that the C library falls back to clone, whose flags can be read
    ioctl TIOCSTI               -> EPERM
    socket of a family but AF_UNIX -> EPERM
    anything else               -> allowed

The namespaces of bubblewrap already hide network, files and processes; the filter takes away the kernel code behind
rare calls, where escapes come from. Numbers are those of the kernel's tables for x86-64 and arm64. Without a table for
this machine there is no filter, and `filter_program` says so with None.
"""

from __future__ import annotations

import platform
import struct

_X86 = 0xC000003E
_ARM = 0xC00000B7

# name -> number on x86-64, on arm64 (None: not there)
REFUSED: dict[str, tuple[int, int | None]] = {
    "ptrace": (101, 117),
    "personality": (135, 92),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "acct": (163, 89),
    "mount": (165, 40),
    "umount2": (166, 39),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "init_module": (175, 105),
    "delete_module": (176, 106),
    "quotactl": (179, 60),
    "lookup_dcookie": (212, 18),
    "kexec_load": (246, 104),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "unshare": (272, 97),
    "perf_event_open": (298, 241),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "setns": (308, 268),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "finit_module": (313, 273),
    "kexec_file_load": (320, 294),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "pidfd_getfd": (438, 438),
    "mount_setattr": (442, 442),
}
CLONE, CLONE3, IOCTL, SOCKET = (56, 220), (435, 435), (16, 29), (41, 198)
NEW_NAMESPACE = 0x7E020080
"""CLONE_NEWTIME, NEWNS, NEWCGROUP, NEWUTS, NEWIPC, NEWUSER, NEWPID, NEWNET."""

_LOAD, _EQUAL, _ANY_BIT, _AT_LEAST, _RETURN = 0x20, 0x15, 0x45, 0x35, 0x06
_ALLOW, _KILL, _EPERM, _ENOSYS = 0x7FFF0000, 0x80000000, 0x00050001, 0x00050026
_NUMBER, _ARCHITECTURE, _ARGUMENT = 0, 4, 16


def _step(code: int, constant: int, yes: int = 0, no: int = 0) -> bytes:
    return struct.pack("<HBBI", code, yes, no, constant)


def filter_program(machine: str | None = None) -> bytes | None:
    """The filter for a machine by the kernel's name of it, or None where there is no table."""
    column = {"x86_64": 0, "aarch64": 1, "arm64": 1}.get(machine or platform.machine())
    if column is None:
        return None
    steps = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_EQUAL, (_X86, _ARM)[column], 1, 0),
        _step(_RETURN, _KILL),
        _step(_LOAD, _NUMBER),
    ]
    if column == 0:  # the x32 numbers, a second door to the same calls
        steps += [_step(_AT_LEAST, 0x40000000, 0, 1), _step(_RETURN, _EPERM)]
    for numbers in REFUSED.values():
        if (number := numbers[column]) is not None:
            steps += [_step(_EQUAL, number, 0, 1), _step(_RETURN, _EPERM)]
    steps += [_step(_EQUAL, CLONE3[column], 0, 1), _step(_RETURN, _ENOSYS)]
    steps += _if_argument(CLONE[column], 0, _ANY_BIT, NEW_NAMESPACE)
    steps += _if_argument(IOCTL[column], 1, _EQUAL, 0x5412)
    steps += [_step(_EQUAL, SOCKET[column], 0, 3), _step(_LOAD, _ARGUMENT)]
    steps += [_step(_EQUAL, 1, 1, 0), _step(_RETURN, _EPERM)]
    return b"".join([*steps, _step(_RETURN, _ALLOW)])


def _if_argument(number: int, which: int, test: int, constant: int) -> list[bytes]:
    """EPERM for the call `number` if its argument passes the test; the number stays loaded."""
    return [
        _step(_EQUAL, number, 0, 4),
        _step(_LOAD, _ARGUMENT + 8 * which),
        _step(test, constant, 0, 1),
        _step(_RETURN, _EPERM),
        _step(_LOAD, _NUMBER),
    ]
