"""The seccomp filter of a judged program, as classic BPF.

Three answers to a system call. What only an attack needs (network, tracing, mounts, executing files,
new namespaces) kills the process: the verdict is `sandbox_violation` and no handler can hide it. What
a library may probe for innocently (shared memory segments, io_uring, calls newer than this list) gets
ENOSYS, as from an older kernel. Everything else passes, inside the namespaces. Runs inside of the room.
"""

from __future__ import annotations

import struct

ALLOW, KILL = 0x7FFF0000, 0x80000000
EPERM, ENOSYS, NO_FAMILY = 0x00050000 | 1, 0x00050000 | 38, 0x00050000 | 97
NOTHING = 0x00050000  # the call returns 0 and has done nothing

# Numbers by machine. Calls from 424 on have one number everywhere.
_COLUMNS = {"x86_64": (0xC000003E, 0), "aarch64": (0xC00000B7, 1)}  # audit architecture, column below
_NEWEST = 450  # a higher number is a call that this list has not judged

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

# Memory that address-space limits do not see, and interfaces that go around this filter.
_MISSING: dict[str, tuple[int, int]] = {
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "vmsplice": (278, 75),
    "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "semget": (64, 190), "semctl": (66, 191), "msgget": (68, 186), "msgctl": (71, 187),
    "mq_open": (240, 180), "migrate_pages": (256, 238), "move_pages": (279, 239), "ioprio_set": (251, 30),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "clone3": (435, 435),  # its flags lie in memory, where a filter cannot look: libc falls back on clone
}  # fmt: skip
# Larger buffers, and descriptors in flight, which no limit on open files counts.
_REFUSED: dict[str, tuple[int, int]] = {
    "personality": (135, 92), "setsockopt": (54, 208), "sendmsg": (46, 211), "sendmmsg": (307, 269),
}  # fmt: skip
_SETSID = (112, 157)  # a session has its own share of the processors: a case has one
_CLONE, _SOCKET, _SOCKETPAIR = (56, 220), (41, 198), (53, 199)
_FCNTL, _SIGACTION = (72, 25), (13, 134)
_SET_PIPE_SIZE, _SIGCHLD = 1031, 17
# How libc asks for nscd, and libuuid for uuidd and for a network card: as on a machine without them.
_PROBES = ((1, 1), (1, 0o2004001), (2, 2))  # domain and type; Python's own sockets are always close-on-exec
_FORK_X86, _VFORK_X86, _CLONE_VFORK = 57, 58, 0x00004000
_KILL_X86, _KILL_ARM = (62, 200), (129, 130)  # kill, tkill
_NEW_NAMESPACE, _CLONE_THREAD, _AF_UNIX = 0x7E020080, 0x00010000, 1


def build_filter(
    machine: str, threads_only: bool, no_signals: bool = False, counted: bool = False
) -> bytes | None:
    """The filter for this machine, or None where its numbers are not known.

    `threads_only` refuses new processes, for kernels and levels where their number cannot be limited;
    `no_signals` refuses kill(), for the level where other processes are in reach. `counted`: a control group counts
    children that nobody waits for, so SIGCHLD is the program's own.
    """
    if machine not in _COLUMNS:
        return None
    architecture, column = _COLUMNS[machine]
    x86 = column == 0
    code = [_load(4), *_unless(architecture, KILL), _load(0)]
    if x86:
        code += _at_least(0x40000000, KILL)  # the x32 calls would go around the numbers below
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
    """New namespaces are an attack; new processes are one only where nobody can count them.

    Who waits for a vfork looks as if it waited for the disk, which is no time of the program's: libc falls back on fork.
    """
    body = [_load(16), _jump(0x45, _NEW_NAMESPACE, 0, 1), _give(KILL)]
    body += [_jump(0x45, _CLONE_VFORK, 0, 1), _give(EPERM)]
    if threads_only:
        body += [_jump(0x45, _CLONE_THREAD, 1, 0), _give(EPERM)]
    body += [_give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _socketpair(number: int) -> list[bytes]:
    """asyncio wakes its loop through a pair of unix sockets; no other kind passes."""
    body = [_load(16), _jump(0x15, _AF_UNIX, 1, 0), _give(KILL), _give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _socket(number: int) -> list[bytes]:
    """Network is an attack, but for what libraries probe for by themselves."""
    body = []
    for domain, kind in _PROBES:
        body += [_load(16), _jump(0x15, domain, 0, 3), _load(24), _jump(0x15, kind, 0, 1), _give(NO_FAMILY)]
    body += [_give(KILL)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _fcntl(number: int) -> list[bytes]:
    """A pipe keeps its 64 KB."""
    body = [_load(24), _jump(0x15, _SET_PIPE_SIZE, 0, 1), _give(EPERM), _give(ALLOW)]
    return [_jump(0x15, number, 0, len(body)), *body]


def _sigaction(number: int) -> list[bytes]:
    """Children that nobody waits for would take their processor time with them: SIGCHLD stays as it is."""
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
