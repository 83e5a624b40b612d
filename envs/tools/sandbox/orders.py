"""Orders to a room of the sandbox: its settings, and the programs to judge. They cross its wall as JSON."""

from __future__ import annotations

from typing import TypedDict


class CaseLimits(TypedDict):
    """Limits of a case, as numbers that the host has checked."""

    time_limit: float
    wall_limit: float
    longest: float
    memory_mb: int
    processes: int
    open_files: int
    output_mb: int
    disk_mb: int


class CaseOrder(TypedDict):
    """One program to judge, as the host sends it."""

    program: str
    stdin: str
    fn_name: str | None
    arguments: str
    limits: CaseLimits


class RoomConfig(TypedDict):
    """Settings of a room, as the host gives them; the last two are the room's own."""

    level: str
    group: list[int]
    room: str
    path: list[str]
    hidden: list[str]
    privileged: bool
    user: int
    threads_only: bool
    folder: str
    filter: bytes | None
