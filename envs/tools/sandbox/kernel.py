"""Linux system calls of the sandbox, through ctypes: namespaces, mounts, capabilities.

This module runs inside the room (`room`) and needs only the standard library.
"""

from __future__ import annotations

import ctypes
import os
import struct

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT = 1, 2, 4, 8, 32
MS_BIND, MS_REC, MS_PRIVATE = 4096, 16384, 1 << 18
MNT_DETACH = 2

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP = 1, 4, 22
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 24, 38

NOBODY = 65534
DEVICES = ("null", "zero", "full", "random", "urandom")

_libc = ctypes.CDLL(None, use_errno=True)
_PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}


def _check(result: int, what: str) -> None:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")


def prctl(option: int, first: object = 0, second: object = 0) -> None:
    """Call prctl(2)."""
    _check(_libc.prctl(option, first, second, 0, 0), f"prctl {option}")


def unshare(flags: int) -> None:
    """Call unshare(2)."""
    _check(_libc.unshare(flags), "unshare (making namespaces)")


def mount(source: str, target: str, kind: str = "", flags: int = 0, options: str = "") -> None:
    """Call mount(2)."""
    result = _libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), options.encode()
    )
    _check(result, f"mount {source} on {target}")


def moved(descriptor: int, place: int) -> int:
    """Move a descriptor to a fixed low number, because the host may have had so many that no program would close it."""
    if descriptor != place:
        os.dup2(descriptor, place, inheritable=False)
        os.close(descriptor)
    return place


def map_user(uid: int, gid: int, inside: int) -> None:
    """Map the user of a new namespace: `inside` the namespace, `uid` and `gid` outside of it."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def become_nobody(user: int) -> None:
    """Change from root to the user of this room.

    The kernel counts pipes, watches and locked memory by user. So programs of one room cannot use up those of another.
    """
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(user, user, user)
    prctl(PR_SET_DUMPABLE, 1)  # otherwise our own /proc/self/uid_map would belong to root


def drop_capabilities() -> None:
    """Drop every capability permanently, also for set-user-id programs."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # there is no capability with a higher number in this kernel
    header = struct.pack("II", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def install_filter(code: bytes) -> None:
    """Attach a seccomp program (`seccomp`) to this process and all its later children."""

    class FilterProgram(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(FilterProgram(len(code) // 8, code)))


def address_space() -> int:
    """Return the bytes of address space that this process has mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def enter_room(binds: list[list[str]], links: list[list[str]], masks: list[str], privileged: bool) -> None:
    """Enter a room with new namespaces and a root of read-only binds. For machines without bubblewrap.

    The function returns in a child process, which is process 1 of the new namespaces. The caller's process waits for the
    child, and then ends.
    """
    uid, gid = os.getuid(), os.getgid()
    kinds = CLONE_NEWNS | CLONE_NEWPID | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS
    unshare(kinds if privileged else kinds | CLONE_NEWUSER)
    if not privileged:
        map_user(uid, gid, inside=uid)
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    prctl(PR_SET_PDEATHSIG, 9)
    mount("none", "/", flags=MS_REC | MS_PRIVATE)
    _build_root(binds, links, masks)


def _build_root(binds: list[list[str]], links: list[list[str]], masks: list[str]) -> None:
    """Build the new root. Pivot twice, so that the old root stays reachable for sources under /tmp."""
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.makedirs("/tmp/old")
    os.makedirs("/tmp/new")
    _pivot("/tmp", "/tmp/old")
    mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for source, target in binds:
        _bind("/old" + source, "/new" + target, MS_RDONLY)
        for mask in (m for m in masks if m.startswith(target + "/")):
            mount("tmpfs", "/new" + mask, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for mask in masks:  # after the allowed packages have their places in them
        mount("none", "/new" + mask, flags=MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)
    for target, name in links:
        os.symlink(target, "/new" + name)
    for device in DEVICES:
        _bind(f"/old/dev/{device}", f"/new/dev/{device}", 0)
    for folder in ("/new/dev/shm", "/new/tmp", "/new/proc"):
        os.makedirs(folder, exist_ok=True)
    for name, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        os.symlink(f"/proc/self/fd{target}", f"/new/dev/{name}")
    _show_processes()
    os.makedirs("/new/.old")
    _pivot("/new", "/new/.old")
    _check(_libc.umount2(b"/.old", MNT_DETACH), "leaving the old root")
    os.rmdir("/.old")
    mount("none", "/", flags=MS_REMOUNT | MS_RDONLY | MS_NOSUID | MS_NODEV)


def show_again(source: str, target: str) -> None:
    """Bind a path that a new mount has covered, from its other place, and show it again."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, flags=MS_BIND | MS_REC)


def _show_processes() -> None:
    """Mount a new /proc. A container that masks its /proc forbids this; the room, but no case, then sees the container's."""
    try:
        mount("proc", "/new/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except PermissionError:
        mount("/old/proc", "/new/proc", flags=MS_BIND | MS_REC)


def _pivot(root: str, old: str) -> None:
    number = _PIVOT_ROOT.get(os.uname().machine)
    if number is None:
        raise OSError(f"pivot_root has no known number on {os.uname().machine}: install bubblewrap")
    os.chdir(root)
    _check(_libc.syscall(number, root.encode(), old.encode()), "pivot_root")
    os.chdir("/")


def _bind(source: str, target: str, flags: int) -> None:
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            open(target, "w").close()
    mount(source, target, flags=MS_BIND | (0 if os.path.isfile(source) else MS_REC))
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # flags that a user cannot clear
    nodev = 0 if target.startswith("/new/dev/") else MS_NODEV
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_NOSUID | nodev | flags | kept)
