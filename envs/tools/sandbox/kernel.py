"""The Linux calls that the sandbox stands on, through ctypes: namespaces, mounts, capabilities.

Runs inside of the room (see `room`), with the standard library alone.
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
    """Move a descriptor to a place of our own: the host may have had so many that no program would close it."""
    if descriptor != place:
        os.dup2(descriptor, place, inheritable=False)
        os.close(descriptor)
    return place


def map_user(uid: int, gid: int, inside: int) -> None:
    """Map the user of a fresh namespace: be `inside` here, and remain `uid` and `gid` to the world."""
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{inside} {uid} 1"),
        ("gid_map", f"{inside} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def become_nobody(user: int) -> None:
    """Real root steps down to a user of the room's own.

    The kernel counts pipes, watches and locked memory by user: what one room's programs hoard, no other room lacks.
    """
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(user, user, user)
    prctl(PR_SET_DUMPABLE, 1)  # else our own /proc/self/uid_map would belong to root


def drop_capabilities() -> None:
    """Give up every capability for good, set-user-id programs included."""
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    for capability in range(64):
        if _libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) < 0:
            break  # past the last capability of this kernel
    header = struct.pack("II", 0x20080522, 0)
    _check(_libc.capset(header, bytes(24)), "capset")


def install_filter(code: bytes) -> None:
    """Attach a seccomp program (`seccomp`) to this process and all that it starts."""

    class Program(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_char_p)]

    prctl(PR_SET_NO_NEW_PRIVS, 1)
    prctl(PR_SET_SECCOMP, 2, ctypes.byref(Program(len(code) // 8, code)))


def address_space() -> int:
    """Bytes of address space that this process has mapped."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")


def enter_room(binds: list[list[str]], links: list[list[str]], masks: list[str], privileged: bool) -> None:
    """Enter a room as bubblewrap does, for machines without it: new namespaces, and a root of read-only binds.

    Returns in a child that is process 1 of the new namespaces; the caller's process waits for it and ends.
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
    """Pivot twice: once to have the old root at a side, so that sources under /tmp stay in reach."""
    mount("tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    os.makedirs("/tmp/old")
    os.makedirs("/tmp/new")
    _pivot("/tmp", "/tmp/old")
    mount("tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for source, target in binds:
        _bind("/old" + source, "/new" + target, MS_RDONLY)
        for mask in (m for m in masks if m.startswith(target + "/")):
            mount("tmpfs", "/new" + mask, "tmpfs", MS_NOSUID | MS_NODEV, "mode=755,size=1m")
    for mask in masks:  # now that the packages let through have their places in them
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
    """Show again what a fresh mount has covered, from the place where it was kept."""
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        open(target, "w").close()
    mount(source, target, flags=MS_BIND | MS_REC)


def _show_processes() -> None:
    """A /proc of our own. Containers that mask theirs forbid one; the room then sees that (no case ever does)."""
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
    kept = os.statvfs(target).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # flags that a user may not clear
    nodev = 0 if target.startswith("/new/dev/") else MS_NODEV
    mount("none", target, flags=MS_REMOUNT | MS_BIND | MS_NOSUID | nodev | flags | kept)
