"""Seccomp filter of a judged program, as classic BPF.

A system call has one of three results. Calls that only an attack needs (network, tracing, mounts, execution of files, new
namespaces) kill the process: the verdict is `sandbox_violation`, and no handler can hide it. Calls that a library may try
without harm (shared memory segments, io_uring, calls newer than this list) get ENOSYS, as from an older kernel. All other
calls pass, inside the namespaces. This module runs inside the room.
"""

from __future__ import annotations

import struct

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, NO_FAMILY = 0x00050000 | 1, 0x00050000 | 38, 0x00050000 | 97
NOTHING = 0x00050000  # the call returns 0 and does nothing

# Numbers of calls, by machine. From 424 on, they are the same on all machines.
_COLUMNS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit architecture, column below
_NEWEST = 450  # calls with higher numbers are not in this list

_FORBIDDEN: dict[str, tuple[int, int]] = {
    "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242),
    "bind": (49, 200), "listen": (50, 201),
    "execve": (59, 221), "execveat": (322, 281),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "unshare": (272, 97), "setns": (308, 268),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265),
    "init_module": (175, 105), "finit_module": (313, 273), "delete_module": (176, 106),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "reboot": (169, 142),
    "swapon": (167, 224), "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60),
    "sethostname": (170, 161), "setdomainname": (171, 162), "settimeofday": (164, 170),
    "clock_settime": (227, 112), "adjtimex": (159, 171), "syslog": (103, 116), "vhangup": (153, 58),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "fanotify_init": (300, 262),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "lookup_dcookie": (212, 18),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431),
    "fsmount": (432, 432), "fspick": (433, 433), "pidfd_getfd": (438, 438), "process_madvise": (440, 440),
    "mount_setattr": (442, 442), "quotactl_fd": (443, 443),
}  # fmt: skip
_FORBIDDEN_X86 = (134, 154, 172, 173)  # uselib, modify_ldt, iopl, ioperm

# Memory that limits on address space do not count, and interfaces that bypass this filter.
_MISSING: dict[str, tuple[int, int]] = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semctl": (66, 191), "msgget": (68, 186), "msgctl": (71, 187),
    "mq_open": (240, 180), "migrate_pages": (256, 238), "move_pages": (279, 239), "ioprio_set": (251, 30),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "clone3": (435, 435),  # a filter cannot read its flags, which are in memory; libc then uses clone
}  # fmt: skip
# Larger buffers, and descriptors in transfer, which no limit on open files counts.
_REFUSED: dict[str, tuple[int, int]] = {
    "personality": (135, 92), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
_SETSID = (112, 157)  # each session has its own share of the processors, and a case has only one
_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
_FCNTL, _SIGACTION = (72, 25), (13, 134)
_SET_PIPE_SIZE, _SIGCHLD = 1031, 17
# Calls of libc for nscd, and of libuuid for uuidd and a network card, fail as on a machine without these.
_PROBES = ((1, 1), (1, 0o2004001), (2, 2))  # domain and type; Python's own sockets are always close-on-exec
_FORK_X86, _VFORK_X86, _CLONE_VFORK = 57, 58, 0x00004000
_KILL_X86, _KILL_ARM = (62, 200), (129, 130)  # kill, tkill
_NEW_NAMESPACE, _CLONE_THREAD, _AF_UNIX = 0x7E020080, 0x00010000, 1


def build_filter(
    machine: str, threads_only: bool, no_signals: bool = False, counted: bool = False
) -> bytes | None:
    """Return the filter for this machine, or None for an unknown machine.

    `threads_only` refuses new processes, for kernels and levels that cannot limit their number. `no_signals` refuses kill(),
    for the level in which other processes are reachable. With `counted`, a control group also counts children for which no
    process waits, so the program may handle SIGCHLD as it likes.
    """
    if machine not in _COLUMNS:
        return None
    architecture, column = _COLUMNS[machine]
    x86 = column == 0
    code = [_load(4), *_unless(architecture, KILL), _load(0)]
    if x86:
        code += _at_least(0x40000000, KILL)  # x32 calls would bypass the numbers below
    for call in _FORBIDDEN.values():
        code += _when(call[column], KILL)
    for number in _FORBIDDEN_X86 if x86 else ():
        code += _when(number, KILL)
    for call in _MISSING.values():
        code += _when(call[column], ENOSYS)
    for call in _REFUSED.values():
        code += _when(call[column], EPERM)
    code += _when(_SETSID[column], NOTHING)
    if x86:
        code += _when(_VFORK_X86, EPERM) + (_when(_FORK_X86, EPERM) if threads_only else [])
    for number in (_KILL_X86 if x86 else _KILL_ARM) if no_signals else ():
        code += _when(number, EPERM)
    code += _at_least(_NEWEST + 1, ENOSYS)
    code += _clone(_CLONE[column], threads_only) + _socketpair(_SOCKETPAIR[column]) + _socket(_SOCKET[column])
    code += _fcntl(_FCNTL[column]) + ([] if counted else _sigaction(_SIGACTION[column])) + [_give(ALLOW)]
    return b"".join(code)


def _clone(number: int, threads_only: bool) -> list[bytes]:
    """Handle clone. New namespaces are an attack. New processes are an attack only if their number cannot be limited.

    vfork is refused, because a process that waits for it looks like one that waits for the disk, and such time does not
    count. libc then uses fork.
    """
    body = [_load(16), _jump(0x45, _NEW_NAMESPACE, 0, 1), _give(KILL)]
    body += [_jump(0x45, _CLONE_VFORK, 0, 1), _give(EPERM)]
    if threads_only:
        body += [_jump(0x45, _CLONE_THREAD, 1, 0), _give(EPERM)]
    body += [_give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _socketpair(number: int) -> list[bytes]:
    """Allow a pair of unix sockets, with which asyncio wakes its loop. No other kind passes."""
    body = [_load(16), _jump(0x15, _AF_UNIX, 1, 0), _give(KILL), _give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _socket(number: int) -> list[bytes]:
    """Treat network sockets as an attack, except for those that libraries try by themselves."""
    body = []
    for domain, kind in _PROBES:
        body += [_load(16), _jump(0x15, domain, 0, 3), _load(24), _jump(0x15, kind, 0, 1), _give(NO_FAMILY)]
    body += [_give(KILL)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _fcntl(number: int) -> list[bytes]:
    """Refuse a change of a pipe's size, which stays 64 KB."""
    body = [_load(24), _jump(0x15, _SET_PIPE_SIZE, 0, 1), _give(EPERM), _give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _sigaction(number: int) -> list[bytes]:
    """Refuse a change of SIGCHLD. If it is ignored, no process waits for children, and their processor time is lost."""
    body = [_load(16), _jump(0x15, _SIGCHLD, 1, 0), _give(ALLOW)]
    body += [_load(24), _jump(0x15, 0, 0, 2), _load(28), _jump(0x15, 0, 1, 0), _give(NOTHING), _give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _load(offset: int) -> bytes:
    return struct.pack("HBBI", 0x20, 0, 0, offset)


def _jump(test: int, value: int, if_true: int, if_false: int) -> bytes:
    return struct.pack("HBBI", test, if_true, if_false, value)


def _give(answer: int) -> bytes:
    return struct.pack("HBBI", 0x06, 0, 0, answer)


def _when(value: int, answer: int) -> list[bytes]:
    return [_jump(0x15, value, 0, 1), _give(answer)]


def _unless(value: int, answer: int) -> list[bytes]:
    return [_jump(0x15, value, 1, 0), _give(answer)]


def _at_least(value: int, answer: int) -> list[bytes]:
    return [_jump(0x35, value, 0, 1), _give(answer)]
